"""The door: the only place where values derived from rows become public (SPEC 0).

bounded = clip(general(values), clip_norm)                       # rows -> a sum of known sensitivity
release = door.release(GaussianMechanism(noise_multiplier=2), bounded)   # charge, then draw
release.value, release.event                                     # the noisy sum and what it cost
"""
