"""Set one thread. A fork server imports this module first: threads of OpenMP would not exist after the fork."""

import torch

torch.set_num_threads(1)
