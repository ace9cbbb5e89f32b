"""Exported folders: what transformers computes with them, what is in their files, what is refused."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors

import hf_fixtures
import hf_folders
import lns_jax
import tokenizer_cases
from interop.test_save import VIT, run_folder
from lns_jax import sharding
from lns_jax.data import byte_bpe, tokenizers
from lns_jax.errors import UserError
from lns_jax.interop import export as export_lib
from lns_jax.interop import shards
from lns_jax.interop.export import export, pick
from lns_jax.layers import schemes
from lns_jax.models import transformer
from tiny import model
from test_cli import command

CLASSES = [
    ({}, 'llama'), ({'bias': 'attn'}, 'llama'), ({'bias': 'all'}, 'llama'), ({'bias': 'qkv'}, 'qwen2'),
    ({'qk_norm': 'head'}, 'qwen3'), ({'sliding_window': 8}, 'mistral'), ({'sliding_window': 8, 'bias': 'qkv'}, 'qwen2'),
    ({'sliding_window': 8, 'window_layers': (2,), 'bias': 'qkv'}, 'qwen2'),
    ({'scheme': 'res_norm', 'qk_norm': 'full'}, 'olmo2'),
    ({'norm': 'nonparametric_layernorm', 'norm_eps': 1e-5, 'clip_qkv': 8.0}, 'olmo'),
    ({'norm': 'layernorm', 'positions': 'learned', 'mlp': 'gelu_tanh', 'bias': 'all', 'num_kv_heads': 4}, 'gpt2'),
    ({**VIT, 'norm': 'layernorm', 'mlp': 'gelu', 'bias': 'all', 'num_kv_heads': 4}, 'vit'),
]
FAST = ('gpt2', 'olmo2', 'qwen2_window_types', 'vit')
LNS = dict(scheme='lns', num_layers=4, vocab_size=258)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A run of an LNS model with random gains."""
  return run_folder(tmp_path_factory.mktemp('export') / 'run', model(**LNS))


@pytest.fixture(scope='module')
def exported(run, tmp_path_factory):
  out = tmp_path_factory.mktemp('exported') / 'hf'
  return out, export(run, out)


def letters() -> tokenizers.Tokenizer:
  """For models of few tokens."""
  return tokenizers.HFTokenizer(byte_bpe.build({c: i for i, c in enumerate('abcdefghij')}, []).to_str())


def tensors(folder) -> dict[str, np.ndarray]:
  return {n: x for f in folder.glob('*.safetensors') for n, x in safetensors.load_file(f).items()}


def settings(folder) -> dict:
  return json.loads((folder / 'config.json').read_text())


def same(a: dict, b: dict):
  assert a.keys() == b.keys()
  for name in a:
    assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape, name
    assert a[name].tobytes() == b[name].tobytes(), name


@pytest.mark.parametrize('name', ['llama_gqa', pytest.param('llama_mha_tied', marks=pytest.mark.slow)])
def test_an_lns_model_is_what_transformers_computed_of_it(name, tmp_path):
  """The fixture's weights with the fixture's logits under forward hooks that multiply by 1 / sqrt(l)."""
  config, params, tokens, right = hf_fixtures.model(name, scheme='lns')
  run = tmp_path / 'run'
  run_folder(run, config, params=params, tokenizer=letters())
  found = export(run, tmp_path / 'hf')
  assert found['model_type'] == 'llama' and found['check']['folded'] == 0
  written, original = tensors(tmp_path / 'hf'), {n[7:]: x for n, x in right.items() if n.startswith('weight/')}
  layer = lambda n: int(re.search(r'layers\.(\d+)\..*layernorm', n)[1]) + 1 if 'layernorm' in n else 1
  same(written, {n: x * np.float32(layer(n) ** -0.5) for n, x in original.items()})
  values = {k: v for k, v in settings(tmp_path / 'hf').items() if k != 'lns_jax'}
  plain = hf_folders.write(tmp_path / 'plain', values, [written])
  config, params, _ = lns_jax.load(plain)
  assert config.scheme == 'pre'
  np.testing.assert_allclose(lns_jax.forward(config, params, tokens), right['lns_logits'], **hf_fixtures.CLOSE)


@pytest.mark.parametrize('name', [
    n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in hf_folders.NAMES])
def test_import_export_import_keeps_every_bit(name, tmp_path):
  """Known faults I1 and I3: names, shapes, types and bits of every tensor; the settings that are read again."""
  path = hf_folders.folder(name, tmp_path)
  found = export(path, tmp_path / 'again')
  assert found['model_type'] == hf_folders.settings(name)['model_type']
  same(tensors(tmp_path / 'again'), {n: x for n, x in hf_folders.tensors(name).items() if 'rotary' not in n})
  before, after = lns_jax.load(path), lns_jax.load(tmp_path / 'again')
  assert export_lib._said(before[0]) == export_lib._said(after[0])
  inputs = hf_folders.reference(name)['inputs']
  np.testing.assert_array_equal(lns_jax.forward(*before[:2], inputs), lns_jax.forward(*after[:2], inputs))


def test_the_folder_opens_as_the_model_that_it_was(run, exported):
  """Scheme, ids and function; and exported again, the same bits: nothing is lost and nothing done twice."""
  out, found = exported
  config, params, tokenizer = lns_jax.load(out)
  original, its_params, its_tokenizer = lns_jax.load(run)
  assert (config.scheme, config.layer_ids, config.depth) == ('lns', (1, 2, 3, 4), 4)
  tokens = np.arange(24).reshape(2, 12)
  a, b = lns_jax.forward(original, its_params, tokens), lns_jax.forward(config, params, tokens)
  np.testing.assert_allclose(a, b, atol=1e-5, rtol=0)
  config, shared, _ = lns_jax.load(out, sharding=sharding.share)
  jax.tree.map(np.testing.assert_array_equal, shared, params)
  assert jax.tree.map(lambda x: x.sharding, shared) == sharding.share(config)
  assert (tokenizer.encode('abc') == its_tokenizer.encode('abc')).all() and tokenizer.bos_id == its_tokenizer.bos_id
  assert found['check']['folded'] == 0 and found['check']['read_again'] < 1e-6 and found['tensors'] == 9 * 4 + 3


def test_an_export_exported_again_keeps_every_bit(exported, tmp_path):
  export(exported[0], tmp_path / 'again')
  same(tensors(tmp_path / 'again'), tensors(exported[0]))
  assert settings(tmp_path / 'again')['lns_jax']['folded'] == settings(exported[0])['lns_jax']['folded']


def test_another_scheme_than_was_folded_is_refused(exported):
  with pytest.raises(UserError, match="of scheme 'lns', not 'pre'"):
    lns_jax.load(exported[0], scheme='pre')
  assert lns_jax.load(exported[0], scheme='lns')[0].scheme == 'lns'


def test_a_pruned_model_keeps_each_layers_own_factor(run, exported, tmp_path):
  """Layer 1 removed: tensors are renumbered 0..2, each with the gain that it had in the whole model."""
  found = export(run, tmp_path / 'less', drop_layers=[1])
  assert found['layer_ids'] == [2, 3, 4] and settings(tmp_path / 'less')['num_hidden_layers'] == 3
  whole = tensors(exported[0])
  number = lambda n: re.sub(r'layers\.(\d+)', lambda m: f'layers.{int(m[1]) - 1}', n)
  same(tensors(tmp_path / 'less'), {number(n): x for n, x in whole.items() if 'layers.0.' not in n})
  config, params, _ = lns_jax.load(tmp_path / 'less')
  assert (config.layer_ids, config.depth, config.scheme) == ((2, 3, 4), 4, 'lns')
  original, its_params, _ = lns_jax.load(run)
  tokens = np.arange(24).reshape(2, 12)
  wanted = lns_jax.forward(*lns_jax.remove_layers(original, its_params, [1]), tokens)
  np.testing.assert_allclose(lns_jax.forward(config, params, tokens), wanted, atol=1e-5, rtol=0)


def test_lists_of_layers_lose_the_entry_of_the_layer(tmp_path):
  """Known fault R5: three of four entries, without that of the removed layer, which is not the last."""
  path = hf_folders.folder('qwen2_window_types', tmp_path)
  types = settings(path)['layer_types']
  export(path, tmp_path / 'less', drop_layers=[2])
  found = settings(tmp_path / 'less')
  assert found['layer_types'] == types[:1] + types[2:] != types[:3]
  assert found['num_hidden_layers'] == 3
  assert {re.match(r'model\.layers\.(\d)', n)[1] for n in tensors(tmp_path / 'less') if 'layers' in n} == set('012')


def test_shards_and_their_index(run, exported, tmp_path):
  """Known fault E3, by hand: all names, all files, the sum of bytes; 21 tensors of two layers untied, 20 tied."""
  found = export(run, tmp_path / 'hf', shard_size='100kB')
  index = json.loads((tmp_path / 'hf' / 'model.safetensors.index.json').read_text())
  on_disk = sorted(p.name for p in (tmp_path / 'hf').glob('*.safetensors'))
  assert len(on_disk) >= 2 and on_disk == sorted(found['files']) == sorted(set(index['weight_map'].values()))
  assert on_disk[0] == f'model-00001-of-{len(on_disk):05}.safetensors'
  for file in on_disk:
    inside = safetensors.load_file(tmp_path / 'hf' / file)
    assert {n for n, f in index['weight_map'].items() if f == file} == inside.keys()
    assert len(inside) == 1 or sum(x.nbytes for x in inside.values()) <= 100_000
  same(tensors(tmp_path / 'hf'), tensors(exported[0]))
  assert index['metadata']['total_size'] == sum(x.nbytes for x in tensors(tmp_path / 'hf').values()) == found['bytes']
  assert not (exported[0] / 'model.safetensors.index.json').exists()
  for tied, count in ((False, 21), (True, 20)):
    two = run_folder(tmp_path / f'run{tied}', model(vocab_size=258, tie_embeddings=tied))
    assert export(two, tmp_path / f'hf{tied}')['tensors'] == count == len(tensors(tmp_path / f'hf{tied}'))


def test_groups_of_tensors():
  sizes = {'a': 4, 'b': 3, 'c': 3, 'd': 9, 'e': 1}
  assert shards.plan(sizes, 7) == [['a', 'b'], ['c'], ['d'], ['e']]
  assert [shards.size(t) for t in ('5GB', '100kB', '1.5 MiB', '7b')] == [5 * 10**9, 10**5, 3 * 2**19, 7]
  for text in ('5', 'GB', '5XB', '0MB', '-1GB', ''):
    with pytest.raises(UserError, match='5GB is one'):
      shards.size(text)


def test_bfloat16_is_the_model_rounded_once(run, exported, tmp_path):
  import ml_dtypes
  found = export(run, tmp_path / 'hf', dtype='bfloat16')
  same(tensors(tmp_path / 'hf'), {n: x.astype(ml_dtypes.bfloat16) for n, x in tensors(exported[0]).items()})
  check = found['check']
  assert settings(tmp_path / 'hf')['torch_dtype'] == 'bfloat16' and check['read_again'] < 1e-5
  assert 1e-4 < check['difference'] / check['largest'] < 0.1 and 0 < check['kl'] < 0.1


@pytest.mark.slow
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_an_export_of_two_bytes_exported_again_keeps_every_bit(dtype, run, tmp_path):
  export(run, tmp_path / 'hf', dtype=dtype)
  export(tmp_path / 'hf', tmp_path / 'again', dtype=dtype)
  same(tensors(tmp_path / 'again'), tensors(tmp_path / 'hf'))


def test_a_number_that_float16_does_not_have_is_named(tmp_path):
  config = model(**LNS)
  params = transformer.init(config, jax.random.key(0))
  params['layers']['2']['mlp']['down'] = params['layers']['2']['mlp']['down'].at[3, 4].set(7e4)
  run = run_folder(tmp_path / 'run', config, params=params)
  with pytest.raises(UserError, match=r'model\.layers\.1\.mlp\.down_proj\.weight .*float16; bfloat16'):
    export(run, tmp_path / 'hf', dtype='float16')
  assert not (tmp_path / 'hf').exists()


def test_the_other_files(run, exported):
  out, _ = exported
  assert {p.name for p in out.iterdir()} == {
      'config.json', 'model.safetensors', 'generation_config.json', 'README.md', 'tokenizer.json',
      'tokenizer_config.json'}
  config, ids = settings(out), {'bos_token_id': 256, 'eos_token_id': 257}
  assert json.loads((out / 'generation_config.json').read_text()) == ids and ids.items() <= config.items()
  assert config['architectures'] == ['LlamaForCausalLM'] and config['max_position_embeddings'] == 256
  record = config['lns_jax']
  assert (record['scheme'], record['layer_ids']) == ('lns', [1, 2, 3, 4])
  assert record['origin'] == {'name': 'run', 'step': 7}
  assert record['folded']['4'] == {'attn_in_norm/gain': 0.5, 'mlp_in_norm/gain': 0.5} and '1' not in record['folded']
  card = (out / 'README.md').read_text()
  assert card.startswith('---\nlicense: unknown\n') and '| updates | 7 |' in card
  assert 'must not be applied again' in card
  assert '`model.layers.*.input_layernorm.weight`, `model.layers.*.post_attention_layernorm.weight`' in card
  told = json.loads((out / 'tokenizer_config.json').read_text())
  assert (told['bos_token'], told['eos_token'], told['add_bos_token']) == ('<bos>', '<eos>', True)
  text = json.loads((out / 'tokenizer.json').read_text())['post_processor']
  assert text['single'][0]['SpecialToken']['id'] == '<bos>' and text['special_tokens']['<bos>']['ids'] == [256]


def test_tokens_added_to_a_sentencepiece_model_leave_with_it(tmp_path):
  ours = tokenizers.SentencePieceTokenizer(
      tokenizer_cases.sentencepiece_model(), eos='<end>', eos_ids=[2], added={500: ('<end>', True)})
  run = run_folder(tmp_path / 'run', model(vocab_size=512), tokenizer=ours)
  export(run, tmp_path / 'hf')
  found = tokenizers.load(tmp_path / 'hf')
  for name in ('added', 'bos_id', 'eos_id', 'eos_ids', 'vocab_size'):
    assert getattr(found, name) == getattr(ours, name), name
  told = json.loads((tmp_path / 'hf' / 'tokenizer_config.json').read_text())
  assert (told['eos_token'], told['unk_token'], told['tokenizer_class']) == ('<end>', '<unk>', 'LlamaTokenizer')


def test_a_model_whose_head_is_still_zero_leaves(tmp_path):
  config = model(**LNS)
  params = transformer.init(config, jax.random.key(0))
  params['head']['table'] = params['head']['table'] * 0
  assert export(run_folder(tmp_path / 'run', config, params=params), tmp_path / 'hf')['check']['difference'] == 0


def test_a_folders_own_tokenizer_files_are_taken_as_they_are(tmp_path):
  path = hf_folders.folder('llama', tmp_path, vocab_size=None)
  (path / 'config.json').write_text(json.dumps(hf_folders.settings('llama') | {'eos_token_id': [1, 2]}))
  (path / 'generation_config.json').write_text('{"eos_token_id": [1, 2], "temperature": 0.6}')
  (path / 'chat_template.jinja').write_text('{{ messages }}')
  (path / 'modeling_custom.py').write_text('raise SystemExit')
  export(path, tmp_path / 'hf')
  for name in ('generation_config.json', 'chat_template.jinja'):
    assert (tmp_path / 'hf' / name).read_text() == (path / name).read_text()
  assert settings(tmp_path / 'hf')['eos_token_id'] == [1, 2] and not (tmp_path / 'hf' / 'modeling_custom.py').exists()


@pytest.mark.parametrize('changes, words', [
    ({'scheme': 'deepnorm'}, 'model.scheme = deepnorm'), ({'scheme': 'peri'}, 'model.scheme = peri'),
    ({'scheme': 'mix', 'num_layers': 4}, 'model.scheme = mix'), ({'norm': 'dyt'}, 'model.norm = dyt'),
    ({'norm': 'layernorm'}, "model.norm = 'rmsnorm' where this model has 'layernorm'"),
    ({'qk_norm': 'head', 'bias': 'qkv'}, "nearest, qwen2, has model.qk_norm = 'none' where this model has 'head'"),
    ({'scheme': 'res_norm'}, "nearest, olmo2, has model.qk_norm = 'full'"),
    ({'norm': 'nonparametric_layernorm', 'norm_eps': 1e-5, 'head_dim': 8}, 'olmo, has model.head_dim = 16'),
])
def test_what_no_stock_class_computes_is_refused_by_name(changes, words, tmp_path):
  run = run_folder(tmp_path / 'run', model(vocab_size=258, **changes))
  with pytest.raises(UserError, match=words):
    export(run, tmp_path / 'hf')
  assert [p.name for p in tmp_path.iterdir()] == ['run']


@pytest.mark.parametrize('changes, model_type', CLASSES)
def test_the_class_follows_from_the_settings(changes, model_type):
  assert pick(model(max_positions=0 if 'family' in changes else 64, **changes)) == model_type


def test_a_class_that_is_asked_for_is_the_one_or_refused():
  config = model(max_positions=64)
  assert pick(config, 'mistral', asked=True) == 'mistral' and pick(config, 'qwen2') == 'llama'
  with pytest.raises(UserError, match='--model_type=qwen2 .*model.bias'):
    pick(config, 'qwen2', asked=True)
  with pytest.raises(UserError, match="known.*Did you mean 'llama'"):
    pick(config, 'lama', asked=True)


@pytest.mark.parametrize('options, words', [
    ({'dtype': 'float8'}, '--dtype=float8'), ({'shard_size': 'big'}, '--shard_size=big'),
    ({'drop_layers': [9]}, 'no layer 9'), ({'step': 3}, '3')])
def test_a_mistake_writes_nothing(options, words, run, tmp_path):
  with pytest.raises(UserError, match=words):
    export(run, tmp_path / 'hf', **options)
  assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over(run, exported):
  with pytest.raises(UserError, match='exists, and nothing is written over it'):
    export(run, exported[0])


def test_a_folder_that_computes_something_else_is_not_left(run, tmp_path, monkeypatch):
  whole = export_lib._cast
  wrong = lambda name, x, dtype: whole(name, x * (1 + 1e-3 * ('layers.2.mlp.up' in name)), dtype)
  monkeypatch.setattr(export_lib, '_cast', wrong)
  with pytest.raises(UserError, match='the folder that was written differ'):
    export(run, tmp_path / 'hf')
  assert list(tmp_path.iterdir()) == []


def test_a_fold_that_is_wrong_is_not_left(run, tmp_path, monkeypatch):
  monkeypatch.setitem(schemes.SCHEMES, 'lns', dataclasses.replace(schemes.SCHEMES['lns'], a=lambda at: 1.001))
  monkeypatch.setattr(export_lib.fold, '_obstacle', lambda config: '')
  with pytest.raises(UserError, match='the plain model differ'):
    export(run, tmp_path / 'hf')
  assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_model_of_images_leaves_as_vit(tmp_path):
  config = model(**VIT, scheme='branch_lns', norm='layernorm', mlp='gelu', bias='all', num_kv_heads=4, num_layers=3)
  export(run_folder(tmp_path / 'run', config), tmp_path / 'hf')
  assert settings(tmp_path / 'hf')['architectures'] == ['ViTForImageClassification']
  again = lns_jax.load(tmp_path / 'hf')[0]
  assert (again.family, again.scheme, again.num_classes) == ('vit', 'branch_lns', 5)


@pytest.mark.slow
def test_the_command(run, tmp_path):
  arguments = [f'--workdir={run}', f'--out={tmp_path / "hf"}', '--drop_layers=2']
  found = command('experiments/export_hf.py', *arguments, timeout=120)
  assert found.returncode == 0, found.stderr
  assert json.loads(found.stdout.splitlines()[-1])['layer_ids'] == [1, 3, 4]
  assert (tmp_path / 'hf' / 'README.md').exists()
  found = command('experiments/export_hf.py', *arguments)
  assert found.returncode == 1 and found.stderr.startswith('error: ') and 'exists' in found.stderr


def test_a_class_that_takes_no_such_model_is_refused(tmp_path):
  with pytest.raises(UserError, match='d_model = 64 is no multiple of model.num_heads = 6.*mistral'):
    pick(model(num_heads=6, num_kv_heads=3, head_dim=10, max_positions=64), 'llama', asked=True)
