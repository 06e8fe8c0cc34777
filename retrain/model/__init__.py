"""What sampler and learner share: loading a model and its adapter, one fused forward pass, attention, and what fits into memory."""
