"""Several algorithms on the same rollouts: the gradient of each, beside one another and beside the
noise of a batch.

`batch` draws or reads the rollouts of one step and knows the arms, `gradients` measures, and `text`
and `figure` show it.
"""
