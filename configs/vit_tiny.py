"""A small ViT for 28 x 28 grey images of 10 classes, or with `:digits` for 8 x 8 ones.

  lns_jax.load_config('vit_tiny'), or 'vit_tiny:digits'

init_std is 0.02 sqrt(384 / 64): matrices of this width start with the gain that 0.02 gives ViT-S.
"""

from lns_jax.configs import common
from lns_jax.errors import UserError, nearest

IMAGES = {'28x28': (28, 4), 'digits': (8, 2)}  # (image, patch)


def get_config(images='28x28'):
  if images not in IMAGES:
    raise UserError(f'vit_tiny has no images {images!r}.{nearest(images, IMAGES)}')
  c = common.vit(d_model=64, layers=6, heads=4)
  size, patch = IMAGES[images]
  c.model.update(image_size=size, patch_size=patch, channels=1, num_classes=10, init_std=0.05)
  c.optimizer.update(lr=2e-3, warmup_steps=20)
  c.train.update(steps=300, batch_size=64)
  c.checkpoint.every = 100
  return c
