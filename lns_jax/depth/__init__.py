"""What a model's depth does: measures of any model of `lns_jax.models`, streaming over batches.

Every measure takes (config, params, batches), where batches are dicts of int32 [B, T] arrays: 'tokens', and
optionally 'segment_ids' (0 is padding), 'targets', 'weights', of an encoder 'token_types'; of a ViT 'images'
[B, S, S, C] and 'labels' [B]; of a vision tower what `lns_jax.models.vl.arrange` makes.
Sampled numbers come as `Estimate`s. `depth.measures.MEASURES` is the table of all of them.
"""

from lns_jax.depth.estimate import Estimate
from lns_jax.depth.gradients import gradients
from lns_jax.depth.heat import mean_jacobian
from lns_jax.depth.jacobian import jacobian
from lns_jax.depth.lens import logit_lens
from lns_jax.depth.linear import replaceability
from lns_jax.depth.monitor import Monitor
from lns_jax.depth.perturb import perturb
from lns_jax.depth.projection import project
from lns_jax.depth.removal import block_drop, layer_drop, prune, sublayer_drop
from lns_jax.depth.similarity import cka
from lns_jax.depth.states import angular, block_influence, profile, variance

__all__ = ['Estimate', 'Monitor', 'angular', 'block_drop', 'block_influence', 'cka', 'gradients', 'jacobian', 'layer_drop',
           'logit_lens', 'mean_jacobian', 'perturb', 'profile', 'project', 'prune', 'replaceability', 'sublayer_drop',
           'variance']
