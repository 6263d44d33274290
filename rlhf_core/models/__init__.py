"""Policy, reference, critic and reward model: load, forward, save."""
