"""Rules of the head and the loss: PC401 and PC402."""

from propcheck.rules.head import initial_loss, logit_scale

RULES = (initial_loss.RULE, logit_scale.RULE)
