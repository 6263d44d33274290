"""Optimiser loops of train_rm and ppo_update."""
