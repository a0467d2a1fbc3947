"""One file per command: parse the options, call the API, render the result."""
