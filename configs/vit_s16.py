"""ViT-S/16 on ImageNet-1K, of which the paper's Table 5 reports three placements of the factor.

  python experiments/vision.py --config=vit_s16 --config.data.source=FILE.npz --workdir=runs/vit_s16

where FILE.npz holds images of 224 x 224 and their labels. ImageNet itself is not read yet, nor are images augmented.

22,050,664 parameters. The rows of Table 5 (LayerScale removed in all) are --config.model.scheme=pre (67.91 % top-1),
lns (66.43 %, the place that helps language models) and branch_lns (68.75 %, the best): one run each, no spread.
The paper states neither optimizer, batch nor epochs: those here are ours, 30,000 updates as Figure 8 shows.
The start is timm's (`lns_jax/models/vit.py`).
"""

from lns_jax.configs import common


def get_config():
  c = common.vit(d_model=384, layers=12, heads=6)
  return c
