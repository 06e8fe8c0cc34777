"""The parts that sampler and learner share: loading a model and its adapter, one fused forward
pass, attention, and memory.
"""
