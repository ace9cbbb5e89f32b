"""ViT-S/16 with 36 layers, timm's vit_small_patch16_36x1_224: what the colour bar of the paper's Figure 8 fits.

  python experiments/vision.py --config=vit_s16_36x1:noscale --config.data.source=FILE.npz --workdir=runs/vit_36

64,665,448 parameters with LayerScale, from 1e-5 as timm starts it. `:noscale` is the paper's baseline, scheme pre
without LayerScale, 64,637,800 parameters; its other curve is branch_lns. Figure 8: output variance above about 3,000
by 30,000 updates without, below about 150 with LNS. Training settings as in `vit_s16`, ours.
"""

from lns_jax.configs import common
from lns_jax.errors import UserError, nearest

KINDS = ('layerscale', 'noscale')


def get_config(kind='layerscale'):
  if kind not in KINDS:
    raise UserError(f'vit_s16_36x1 has no kind {kind!r}.{nearest(kind, KINDS)}')
  c = common.vit(d_model=384, layers=36, heads=6)
  if kind == 'layerscale':
    c.model.update(scheme='layerscale', layerscale_init=1e-5)
  return c
