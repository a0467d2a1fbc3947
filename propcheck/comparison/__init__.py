"""Compare runs: match their sites and parameters, find the differences, and judge them against tolerances."""
