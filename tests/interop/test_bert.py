"""BERT in and out of Hugging Face's names: every form of its files, every field of its config.json, its tokenizer."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.numpy

import lns_jax
from lns_jax import depth, samples
from lns_jax.errors import UserError
from lns_jax.interop import export, families, fold, names, import_model
from lns_jax.models import by_layer
from hf_fixtures import fixture
import wordpiece

CLOSE = dict(rtol=0, atol=1e-5)
KINDS = {'mlm': 'BertForMaskedLM', 'squad': 'BertForQuestionAnswering', 'none': 'BertModel'}


def tensors(head='mlm'):
  """Those of transformers' tiny BERT with this head."""
  found = {n.removeprefix('weight/'): x for n, x in fixture('bert')[1].items() if n.startswith('weight/')}
  others = {'mlm': ('qa_outputs',), 'squad': ('cls.',), 'none': ('qa_outputs', 'cls.')}[head]
  return {n: x for n, x in found.items() if not n.startswith(others)}


def folder(path, head='mlm', weights=None, tokenizer=False, **fields):
  """A Hugging Face folder of it."""
  path.mkdir(exist_ok=True)
  config = fixture('bert')[0]['config'] | {'model_type': 'bert', 'architectures': [KINDS[head]]} | fields
  (path / 'config.json').write_text(json.dumps({k: v for k, v in config.items() if v != 'absent'}))
  weights = tensors(head) if weights is None else weights
  safetensors.numpy.save_file({n: np.ascontiguousarray(x) for n, x in weights.items()}, path / 'model.safetensors')
  if tokenizer:
    wordpiece.save(path)
  return path


def real(right):
  return right['mask'] > 0


def check_logits(config, params, name='logits'):
  right = fixture('bert')[1]
  found = jax.jit(lns_jax.forward, static_argnums=0)(
      config, params, right['tokens'], segment_ids=right['mask'], token_types=right['token_types'])
  np.testing.assert_allclose(found[real(right)], right[name][real(right)], **CLOSE)


def check_states(config, params):
  right = fixture('bert')[1]
  found = jax.jit(lns_jax.states, static_argnums=0)(
      config, params, right['tokens'], segment_ids=right['mask'], token_types=right['token_types'])
  np.testing.assert_allclose(found[:, real(right)], right['states'][:, real(right)], **CLOSE)


def test_a_masked_language_model(tmp_path):
  config, params, tokenizer = lns_jax.load(folder(tmp_path / 'm'))
  assert (config.family, config.scheme, config.head, config.tie_embeddings) == ('encoder', 'post', 'mlm', True)
  assert config.norm_eps == 1e-12 and config.max_positions == 20 and config.type_vocab_size == 3 and tokenizer is None
  check_logits(config, params)
  check_states(config, params)


def test_a_model_of_answers(tmp_path):
  config, params, _ = lns_jax.load(folder(tmp_path / 'm', 'squad'))
  assert config.head == 'squad'
  check_logits(config, params, 'squad_logits')


@pytest.mark.parametrize('prefix', ['bert.', ''])
def test_a_model_without_a_head_with_its_prefix_or_without(tmp_path, prefix, caplog):
  weights = {prefix + n.removeprefix('bert.'): x for n, x in tensors('none').items()}
  weights |= {f'{prefix}pooler.dense.weight': np.ones((16, 16), np.float32),
              f'{prefix}pooler.dense.bias': np.ones(16, np.float32),
              f'{prefix}embeddings.position_ids': np.arange(20)[None]}
  config, params, _ = lns_jax.load(folder(tmp_path / 'm', 'none', weights))
  check_states(config, params)
  assert f'{prefix}pooler.dense.bias, {prefix}pooler.dense.weight are of no use' in caplog.text
  assert 'position_ids' not in caplog.text
  with pytest.raises(UserError, match='model.head = none'):
    depth.layer_drop(config, params, [{'tokens': fixture('bert')[1]['tokens']}])


def test_names_of_older_files(tmp_path):
  """LayerNorm.gamma and beta, as in the first checkpoints of BERT; a head for pairs of sentences beside."""
  old = lambda n: n.replace('LayerNorm.weight', 'LayerNorm.gamma').replace('LayerNorm.bias', 'LayerNorm.beta')
  weights = {old(n): x for n, x in tensors().items()} | {'cls.seq_relationship.weight': np.ones((2, 16), np.float32)}
  config, params, _ = lns_jax.load(folder(tmp_path / 'm', weights=weights, architectures=['BertForPreTraining']))
  check_logits(config, params)


def test_the_decoder_may_be_there_again(tmp_path):
  head, table = 'cls.predictions.decoder', tensors()['bert.embeddings.word_embeddings.weight']
  bias = tensors()['cls.predictions.bias']
  again = {f'{head}.weight': table, f'{head}.bias': bias}
  config, params, _ = lns_jax.load(folder(tmp_path / 'a', weights=tensors() | again))
  check_logits(config, params)
  only = {n: x for n, x in tensors().items() if n != 'cls.predictions.bias'} | {f'{head}.bias': bias}
  config, params, _ = lns_jax.load(folder(tmp_path / 'b', weights=only))
  check_logits(config, params)
  with pytest.raises(UserError, match='cls.predictions.decoder.weight is not the embedding'):
    lns_jax.load(folder(tmp_path / 'c', weights=tensors() | {f'{head}.weight': table + 1}))
  with pytest.raises(UserError, match='cls.predictions.bias and cls.predictions.decoder.bias .* differ'):
    lns_jax.load(folder(tmp_path / 'd', weights=tensors() | {f'{head}.bias': bias + 1}))


def test_a_decoder_of_its_own(tmp_path):
  table = np.random.default_rng(0).standard_normal((41, 16)).astype(np.float32)
  weights = tensors() | {'cls.predictions.decoder.weight': table}
  config, params, _ = lns_jax.load(folder(tmp_path / 'm', weights=weights, tie_word_embeddings=False))
  np.testing.assert_array_equal(params['head']['table'], table)
  assert not config.tie_embeddings


@pytest.mark.parametrize('head', KINDS)
def test_in_and_out_again_is_the_same_bit_for_bit(tmp_path, head):
  config, params, _ = lns_jax.load(folder(tmp_path / 'm', head))
  family, leaves = families.FAMILIES['bert'], dict(by_layer.leaves(params))
  out = {e.theirs: np.asarray(e.write(np.asarray(leaves[e.ours]), config)) for e in names.table(config, family.rows)}
  assert out.keys() == tensors(head).keys()
  for name, x in tensors(head).items():
    np.testing.assert_array_equal(out[name], x)
  settings = families.of(family.theirs(config) | {'model_type': 'bert'}, 'config.json')[1]
  assert lns_jax.ModelConfig(**settings) == config


@pytest.mark.parametrize('head', KINDS)
def test_export_of_an_imported_folder_is_that_folder(tmp_path, head):
  found = export.export(folder(tmp_path / 'm', head), tmp_path / 'out')
  again = safetensors.numpy.load_file(tmp_path / 'out' / 'model.safetensors')
  assert found['model_type'] == 'bert' and found['check']['read_again'] == 0 and again.keys() == tensors(head).keys()
  for name, x in tensors(head).items():
    np.testing.assert_array_equal(again[name], x)
  config = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert config['architectures'] == [KINDS[head]] and config['model_type'] == 'bert'
  auto = {'mlm': 'AutoModelForMaskedLM', 'squad': 'AutoModelForQuestionAnswering', 'none': 'AutoModel'}[head]
  assert f'{auto}.from_pretrained' in (tmp_path / 'out' / 'README.md').read_text()


def test_dropped_layers_leave_the_others_where_they_are(tmp_path):
  export.export(folder(tmp_path / 'm'), tmp_path / 'out', drop_layers=[2])
  again = safetensors.numpy.load_file(tmp_path / 'out' / 'model.safetensors')
  at = 'bert.encoder.layer'
  np.testing.assert_array_equal(again[f'{at}.1.output.dense.weight'], tensors()[f'{at}.2.output.dense.weight'])
  assert not any(n.startswith(f'{at}.2.') for n in again)
  config, params, _ = lns_jax.load(tmp_path / 'out')
  whole = lns_jax.remove_layers(*lns_jax.load(tmp_path / 'm')[:2], [2])
  tokens = fixture('bert')[1]['tokens']
  np.testing.assert_allclose(lns_jax.forward(config, params, tokens), lns_jax.forward(*whole, tokens), **CLOSE)


@pytest.mark.parametrize('scheme', ['mix', 'pre'])
def test_another_scheme_of_an_encoder_has_no_stock_class(scheme):
  config = lns_jax.ModelConfig(family='encoder', causal=False, scheme=scheme, norm='layernorm', mlp='gelu', bias='all',
                               max_positions=8, num_layers=4, norm_eps=1e-12)
  with pytest.raises(UserError, match=f"scheme.*{scheme}"):
    export.pick(dataclasses.replace(config, scheme=fold.plain_scheme(config)))


def test_a_run_folder_of_it_is_measured_on_masked_text(tmp_path):
  V = wordpiece.make().vocab_size
  table = {'bert.embeddings.word_embeddings.weight': np.random.default_rng(0).normal(size=(V, 16)).astype(np.float32),
           'cls.predictions.bias': np.zeros(V, np.float32)}
  source = folder(tmp_path / 'm', weights=tensors() | table, tokenizer=True, vocab_size=V)
  import_model.import_model(source, tmp_path / 'run')
  (tmp_path / 'a.txt').write_text('the sun is big. ' * 50)
  config, params, tokenizer = lns_jax.load(tmp_path / 'run')
  assert tokenizer.mask_id == 4 and config.head == 'mlm'
  found = samples.open_sample(str(tmp_path / 'run'), config, tokenizer, str(tmp_path / 'a.txt'), 100, 0)
  assert len(found.rows) == 5 and found.rows[0]['tokens'][0] == 2 and len(found.rows[0]['tokens']) == 20
  batch = {k: np.stack([row[k] for row in found.rows]) for k in found.rows[0]}
  drop = depth.layer_drop(config, params, [batch])
  text = batch['segment_ids'].sum(1) - 2
  assert drop['baseline'].tokens == batch['weights'].sum() == np.maximum(np.round(0.15 * text), 1).sum()
  assert np.isfinite(drop['layer_drop'].value).all()


@pytest.mark.parametrize('fields, words', [
    ({'position_embedding_type': 'relative_key'}, "position_embedding_type = 'relative_key'"),
    ({'is_decoder': True}, 'is_decoder = True'), ({'add_cross_attention': True}, 'add_cross_attention = True'),
    ({'hidden_act': 'relu'}, "hidden_act = 'relu'"), ({'hidden_act': 'gelu_new'}, "hidden_act = 'gelu_new'"),
    ({'directionality': 'uni'}, "directionality = 'uni'"), ({'pruned_heads': {'1': [0]}}, "'pruned_heads'"),
    ({'architectures': ['BertForSequenceClassification']}, 'architectures = .*BertForMaskedLM')])
def test_fields_that_change_the_maths_are_refused_by_name(tmp_path, fields, words):
  with pytest.raises(UserError, match=words):
    lns_jax.load(folder(tmp_path / 'm', **fields))


def test_neutral_and_missing_fields(tmp_path):
  neutral = {'pooler_type': 'first_token_transform', 'pooler_fc_size': 768, 'directionality': 'bidi',
             'hidden_act': 'absent', 'layer_norm_eps': 'absent', 'classifier_dropout': None, 'position_embedding_type': 'absolute'}
  config, params, _ = lns_jax.load(folder(tmp_path / 'm', **neutral))
  check_logits(config, params)


@pytest.mark.parametrize('change, words', [
    (lambda w: w.pop('bert.encoder.layer.1.attention.self.key.bias'), 'no tensor bert.*layer.1.attention.self.key.bias'),
    (lambda w: w.update({'bert.encoder.layer.3.output.dense.bias': np.ones(16, np.float32)}), 'layer.3.output.dense'),
    (lambda w: w.update({'bert.embeddings.token_type_embeddings.weight': np.ones((2, 16), np.float32)}),
     r'token_type_embeddings.weight has shape \[2, 16\], .* \[3, 16\]'),
    (lambda w: w.update({'qa_outputs.bias': np.ones(2, np.float32)}), 'qa_outputs.bias')])
def test_missing_extra_and_misshapen_tensors_are_named(tmp_path, change, words):
  weights = tensors()
  change(weights)
  with pytest.raises(UserError, match=words):
    lns_jax.load(folder(tmp_path / 'm', weights=weights))


def test_the_tokenizer_beside_it(tmp_path):
  big = dict(vocab_size=wordpiece.make().vocab_size)
  table = {'bert.embeddings.word_embeddings.weight': np.ones((big['vocab_size'], 16), np.float32),
           'cls.predictions.bias': np.ones(big['vocab_size'], np.float32)}
  _, _, tokenizer = lns_jax.load(folder(tmp_path / 'm', weights=tensors() | table, tokenizer=True, **big))
  assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.mask_id) == (2, 3, 4)
  ids, spans = tokenizer.spans('The SUN rises, Café')
  assert list(ids) == list(tokenizer.encode('the sun rises, cafe'))
  assert [('The SUN rises, Café')[a:b] for a, b in spans[:4]] == ['The', 'SUN', 'rises', ',']
  assert ('The SUN rises, Café')[spans[4][0]:spans[-1][1]] == 'Café'
