"""A small ViT for 28 x 28 grey images of 10 classes, or with `:digits` for 8 x 8 ones.

  python experiments/vision.py --config=vit_tiny:digits --config.model.scheme=branch_lns --workdir=runs/digits
  python experiments/vision.py --config=vit_tiny --config.data.source=FOLDER --workdir=runs/fashion

where FOLDER holds the four files of MNIST or Fashion-MNIST; the digits are scikit-learn's, 1,797 of them.

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
  c.eval.every = 100
  c.checkpoint.every = 100
  c.data.update(source='digits' if images == 'digits' else 'mnist', validation_fraction=0.2)
  return c
