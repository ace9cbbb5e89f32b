"""The one table between our parameters and the tensors of a Hugging Face folder; it drives import and export."""

import dataclasses
import functools
import re
from collections.abc import Callable

import jax

from lns_jax.config import ModelConfig
from lns_jax.errors import UserError
from lns_jax.models import by_layer, layout, transformer


@dataclasses.dataclass(frozen=True)
class Form:
  """How a leaf of a model with settings c is made of a tensor of theirs, and back; for arrays and their shapes."""

  ours: Callable = lambda x, c: x
  theirs: Callable = lambda x, c: x


AS_IS = Form()
LINEAR = Form(lambda x, c: x.T, lambda x, c: x.T)  # [in, out] <-> [out, in]
# [D, H, h] <-> [H h, D]
HEADS_IN = Form(lambda x, c: x.reshape(-1, c.head_dim, x.shape[1]).transpose(2, 0, 1),
                lambda x, c: x.transpose(1, 2, 0).reshape(-1, x.shape[0]))
# [H, h, D] <-> [D, H h]
HEADS_OUT = Form(lambda x, c: x.T.reshape(-1, c.head_dim, x.shape[0]), lambda x, c: x.reshape(-1, x.shape[2]).T)
# GPT-2 stores matrices as [in, out]: [D, H, h] <-> [D, H h], [H, h, D] <-> [H h, D]
COLUMNS = Form(lambda x, c: x.reshape(x.shape[0], -1, c.head_dim), lambda x, c: x.reshape(x.shape[0], -1))
ROWS = Form(lambda x, c: x.reshape(-1, c.head_dim, x.shape[1]), lambda x, c: x.reshape(-1, x.shape[2]))
ONE_ROW = Form(lambda x, c: x[0], lambda x, c: x[None])  # [T, D] <-> [1, T, D]
ONE_TOKEN = Form(lambda x, c: x[0, 0], lambda x, c: x[None, None])  # [D] <-> [1, 1, D]
# [P P C, D], rows before columns before channels <-> a convolution's [D, C, P, P]
PATCHES = Form(lambda x, c: x.transpose(2, 3, 1, 0).reshape(-1, x.shape[0]),
               lambda x, c: x.reshape(c.patch_size, c.patch_size, c.channels, -1).transpose(3, 2, 0, 1))


@dataclasses.dataclass(frozen=True)
class Entry:
  """One leaf of ours. ours: its path; theirs: name of the tensor; part: (i, n), the i-th of n along `axis` of it."""

  ours: str
  theirs: str
  form: Form = AS_IS
  part: tuple[int, int] = (0, 1)
  axis: int = -1

  def read(self, tensor, config: ModelConfig):
    """The leaf, from the whole tensor."""
    i, n = self.part
    if n > 1:
      width = tensor.shape[self.axis] // n
      within = [slice(None)] * tensor.ndim
      within[self.axis] = slice(i * width, (i + 1) * width)
      tensor = tensor[tuple(within)]
    return self.form.ours(tensor, config)

  def write(self, leaf, config: ModelConfig):
    """The tensor, or its part, from the leaf."""
    return self.form.theirs(leaf, config)

  def whole(self, leaf, config: ModelConfig) -> tuple[int, ...]:
    """The whole tensor's shape, from the leaf or its `jax.ShapeDtypeStruct`."""
    shape = list(jax.eval_shape(lambda x: self.write(x, config), leaf).shape)
    shape[self.axis] *= self.part[1]
    return tuple(shape)


def both(ours: str, theirs: str, form: Form, bias: bool = True) -> list[Entry]:
  """A matrix and its bias."""
  return [Entry(ours, f'{theirs}.weight', form)] + [Entry(f'{ours}_bias', f'{theirs}.bias')] * bias


def _norm(ours: str, theirs: str) -> list[Entry]:
  return [Entry(f'{ours}/gain', f'{theirs}.weight'), Entry(f'{ours}/bias', f'{theirs}.bias')]


def _llama() -> list[Entry]:
  """Llama and all that differs from it in settings alone."""
  at, ours = 'model.layers.{i}', 'layers/{l}'
  rows = [Entry('embed/table', 'model.embed_tokens.weight'), Entry('head/table', 'lm_head.weight')]
  rows += _norm('final_norm', 'model.norm')
  for sub, pre, res in (('attn', 'input_layernorm', 'post_attention_layernorm'),
                        ('mlp', 'post_attention_layernorm', 'post_feedforward_layernorm')):
    rows += _norm(f'{ours}/{sub}_in_norm', f'{at}.{pre}')
    rows += _norm(f'{ours}/{sub}_out_norm', f'{at}.{pre}')  # the paper's code, whose Post-LN models keep the names
    rows += _norm(f'{ours}/{sub}_res_norm', f'{at}.{res}')
  for n in 'qkv':
    rows += both(f'{ours}/attn/{n}', f'{at}.self_attn.{n}_proj', HEADS_IN)
  rows += both(f'{ours}/attn/o', f'{at}.self_attn.o_proj', HEADS_OUT)
  for n in 'qk':
    rows += _norm(f'{ours}/attn/{n}_norm', f'{at}.self_attn.{n}_norm')
  for n in ('gate', 'up', 'down'):
    rows += both(f'{ours}/mlp/{n}', f'{at}.mlp.{n}_proj', LINEAR)
  return rows


def _gpt2() -> list[Entry]:
  at, ours = 'transformer.h.{i}', 'layers/{l}'
  rows = [Entry('embed/table', 'transformer.wte.weight'), Entry('positions/table', 'transformer.wpe.weight'),
          Entry('head/table', 'lm_head.weight')]
  rows += _norm('final_norm', 'transformer.ln_f')
  rows += _norm(f'{ours}/attn_in_norm', f'{at}.ln_1') + _norm(f'{ours}/mlp_in_norm', f'{at}.ln_2')
  for number, n in enumerate('qkv'):
    rows += [Entry(f'{ours}/attn/{n}', f'{at}.attn.c_attn.weight', COLUMNS, (number, 3)),
             Entry(f'{ours}/attn/{n}_bias', f'{at}.attn.c_attn.bias', AS_IS, (number, 3))]
  rows += both(f'{ours}/attn/o', f'{at}.attn.c_proj', ROWS)
  rows += both(f'{ours}/mlp/up', f'{at}.mlp.c_fc', AS_IS) + both(f'{ours}/mlp/down', f'{at}.mlp.c_proj', AS_IS)
  return rows


def _encoder_layer(at: str, ours: str, inside: str) -> list[Entry]:
  """The projections of a layer as ViT and BERT name them. inside: the part of the attention with q, k and v."""
  rows = []
  for n, name in (('q', 'query'), ('k', 'key'), ('v', 'value')):
    rows += both(f'{ours}/attn/{n}', f'{at}.attention.{inside}.{name}', HEADS_IN)
  rows += both(f'{ours}/attn/o', f'{at}.attention.output.dense', HEADS_OUT)
  rows += both(f'{ours}/mlp/up', f'{at}.intermediate.dense', LINEAR)
  return rows + both(f'{ours}/mlp/down', f'{at}.output.dense', LINEAR)


def _vit() -> list[Entry]:
  at, ours = 'vit.encoder.layer.{i}', 'layers/{l}'
  rows = [Entry('embed/patch', 'vit.embeddings.patch_embeddings.projection.weight', PATCHES),
          Entry('embed/patch_bias', 'vit.embeddings.patch_embeddings.projection.bias'),
          Entry('embed/positions', 'vit.embeddings.position_embeddings', ONE_ROW),
          Entry('embed/cls', 'vit.embeddings.cls_token', ONE_TOKEN),
          Entry('head/table', 'classifier.weight'), Entry('head/bias', 'classifier.bias')]
  rows += _norm('final_norm', 'vit.layernorm')
  rows += _norm(f'{ours}/attn_in_norm', f'{at}.layernorm_before')
  rows += _norm(f'{ours}/mlp_in_norm', f'{at}.layernorm_after')
  return rows + _encoder_layer(at, ours, 'attention')


def _bert() -> list[Entry]:
  at, ours, head = 'bert.encoder.layer.{i}', 'layers/{l}', 'cls.predictions'
  rows = [Entry(f'embed/{n}', f'bert.embeddings.{name}_embeddings.weight')
          for n, name in (('table', 'word'), ('positions', 'position'), ('types', 'token_type'))]
  rows += _norm('embed_norm', 'bert.embeddings.LayerNorm')
  rows += _norm(f'{ours}/attn_out_norm', f'{at}.attention.output.LayerNorm')
  rows += _norm(f'{ours}/mlp_out_norm', f'{at}.output.LayerNorm')
  rows += _encoder_layer(at, ours, 'self')
  rows += both('head/dense', f'{head}.transform.dense', LINEAR) + _norm('head/norm', f'{head}.transform.LayerNorm')
  rows += [Entry('head/table', f'{head}.decoder.weight'), Entry('head/bias', f'{head}.bias')]
  return rows + both('head/span', 'qa_outputs', AS_IS)


LLAMA = _llama()
GPT2 = _gpt2()
VIT = _vit()
BERT = _bert()


def nested(leaves: dict) -> dict:
  """The tree whose `by_layer.leaves` these are."""
  tree = {}
  for path, leaf in leaves.items():
    *above, last = path.split('/')
    node = tree
    for part in above:
      node = node.setdefault(part, {})
    node[last] = leaf
  return tree


@functools.lru_cache(maxsize=4)  # a model of 30 layers takes a quarter of a second, and is asked for several times
def shapes(config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
  """{path: shape and type} of the model's parameters, one layer an entry."""
  return dict(by_layer.leaves(
      jax.eval_shape(lambda: layout.unstack(transformer.unprofiled(config, jax.random.key(0))))))


def table(config: ModelConfig, rows: list[Entry]) -> list[Entry]:
  """The entries of a model's leaves, in the order of its parameters. Raises UserError for one that has no tensor.

  Layer ids are identities, a tensor's number is a position: layer_ids[i] is number i.
  """
  known = {e.ours: e for e in rows}
  position = {l: i for i, l in enumerate(config.layer_ids)}
  found = []
  for ours in shapes(config):
    layer = re.match(r'layers/(\d+)/', ours)
    pattern = re.sub(r'^layers/\d+/', 'layers/{l}/', ours)
    if pattern not in known:
      raise UserError(f'no tensor of a Hugging Face folder stands for {ours} of a model of scheme {config.scheme}.')
    theirs = known[pattern].theirs
    if layer:
      theirs = theirs.format(i=position[int(layer[1])])
    found.append(dataclasses.replace(known[pattern], ours=ours, theirs=theirs))
  return found
