"""RLHF with PPO as a pipeline of offline stages: the library behind the stages."""
