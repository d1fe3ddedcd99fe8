"""Pipeline stages of unedited models: what passes between modules, the division, one stage's pass, training steps."""
