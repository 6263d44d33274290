"""One thin main per node of dvc.yaml: read, call rlhf_core, write. Stages never import each other."""

import gc
import sys

if sys.argv[0] == "-m":  # what `python -m stages.NAME` has there until NAME itself is found
    gc.disable()  # imports go twice as fast; run_stage turns it on again (rlhf_core/collection.py)
