"""The reference decoder, written so that each equation of a paper is one line of code."""
