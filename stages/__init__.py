"""One thin main per node of dvc.yaml: read, call rlhf_core, write. Stages never import each other."""
