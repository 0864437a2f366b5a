"""Floor 3: the drafter, its training and speculative decoding; the only home of training code."""
