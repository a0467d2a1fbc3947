"""The reference decoder, written to be read: a paper's equation is a line of code here."""
