"""A Hugging Face folder written as GGUF is the same model when it is read again."""

import json

import gguf as library
import jax
import numpy as np
import pytest

import hf_folders
from lns_jax.data import tokenizers
from lns_jax.errors import UserError
from lns_jax.interop import gguf, gguf_tokenizer, gguf_write, load, weights
from lns_jax.models import transformer
from tokenizer_cases import CORPUS, LIKE_LLAMA, TEXT, sentencepiece_model

NAMES = ('gpt2', 'llama', 'llama_biased', 'llama_rope_linear', 'llama_rope_llama3', 'llama_rope_yarn',
         'olmo', 'olmo2', 'qwen2', 'qwen3')


def written(name, tmp_path, dtype='float32', **changes):
  folder = hf_folders.folder(name, tmp_path, **changes)
  out = tmp_path / 'model.gguf'
  found = gguf_write.write(folder, out, dtype=dtype)
  assert found['out'] == str(out) and found['bytes'] == out.stat().st_size
  return weights.open(folder), gguf.GGUFWeights(out)


@pytest.mark.parametrize('name', NAMES)
def test_every_number_and_setting_comes_back(name, tmp_path):
  folder, file = written(name, tmp_path)
  assert file.shapes == {n: s for n, s in folder.shapes.items()}
  for tensor in folder.shapes:
    np.testing.assert_array_equal(file.get(tensor), folder.get(tensor), err_msg=tensor)
  arch = name.split('_')[0]
  assert file.config['model_type'] == arch and file.config['tie_word_embeddings'] == bool(
      folder.config.get('tie_word_embeddings', arch == 'gpt2'))


@pytest.mark.parametrize('name', ['gpt2', 'llama_rope_llama3'])
def test_logits_are_those_of_transformers(name, tmp_path):
  # The file is llama.cpp's order of rows; what its reader computes is checked against the folder's own reference.
  written(name, tmp_path)
  config, params, _ = load.load(tmp_path / 'model.gguf')
  reference = hf_folders.reference(name)
  logits = jax.jit(lambda params: transformer.forward(config, params, reference['inputs']))(params)
  np.testing.assert_allclose(logits, reference['logits'], **hf_folders.CLOSE)


def test_rows_are_in_the_order_that_llama_cpp_rotates(tmp_path):
  folder, _ = written('llama', tmp_path)
  tensors = {t.name: t for t in library.GGUFReader(tmp_path / 'model.gguf').tensors}
  h = folder.config['head_dim']
  stored, plain = tensors['blk.0.attn_q.weight'].data, folder.get('model.layers.0.self_attn.q_proj.weight')
  for head in range(folder.config['num_attention_heads']):
    for j in range(h // 2):
      np.testing.assert_array_equal(stored[head * h + 2 * j], plain[head * h + j])
      np.testing.assert_array_equal(stored[head * h + 2 * j + 1], plain[head * h + h // 2 + j])


@pytest.mark.parametrize('dtype, kind, error', [
    ('float16', 'F16', 2.0 ** -11), ('bfloat16', 'BF16', 2.0 ** -8), ('q8_0', 'Q8_0', 1 / 254)])
def test_matrices_are_of_the_type_asked_for(dtype, kind, error, tmp_path):
  folder, file = written('llama', tmp_path, dtype)
  tensors = {t.name: t.tensor_type.name for t in library.GGUFReader(tmp_path / 'model.gguf').tensors}
  assert tensors['output_norm.weight'] == 'F32'
  width = folder.config['hidden_size']
  assert tensors['blk.0.attn_q.weight'] == (kind if kind != 'Q8_0' or width % 32 == 0 else 'F16')
  assert dtype != 'q8_0' or 'Q8_0' in tensors.values()
  name = 'model.layers.0.mlp.down_proj.weight'
  a, b = np.asarray(file.get(name), np.float32), folder.get(name)
  assert 0 < np.abs(a - b).max() <= 1.01 * error * np.abs(b).max()


def bpe(folder):
  tokenizers.train_bpe(CORPUS, 300).save(folder)


def llama3(folder):
  made = json.loads(tokenizers.train_bpe(CORPUS, 300)._inner.to_str())
  pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+" \
            r'|\s+(?!\S)|\s+'
  made['pre_tokenizer'] = {'type': 'Sequence', 'pretokenizers': [
      {'type': 'Split', 'pattern': {'Regex': pattern}, 'behavior': 'Isolated', 'invert': False},
      {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': False}]}
  made['model']['ignore_merges'] = True
  bos = {'SpecialToken': {'id': '<bos>', 'type_id': 0}}
  made['post_processor'] = {'type': 'TemplateProcessing', 'single': [bos, {'Sequence': {'id': 'A', 'type_id': 0}}],
                            'pair': [{'Sequence': {'id': 'A', 'type_id': 0}}, {'Sequence': {'id': 'B', 'type_id': 0}}],
                            'special_tokens': {'<bos>': {'id': '<bos>', 'ids': [0], 'tokens': ['<bos>']}}}
  (folder / 'tokenizer.json').write_text(json.dumps(made))
  (folder / 'generation_config.json').write_text(json.dumps({'eos_token_id': [1, 9]}))


def llama2(folder):
  (folder / 'tokenizer.model').write_bytes(sentencepiece_model(**LIKE_LLAMA))
  size = tokenizers.load(folder).vocab_size
  (folder / 'added_tokens.json').write_text(json.dumps({'<pause>': size}))


@pytest.mark.parametrize('make, pre', [(bpe, 'gpt-2'), (llama3, 'llama-bpe'), (llama2, None)])
def test_the_tokenizer_comes_along(make, pre, tmp_path):
  tensors = {n: t for n, t in hf_folders.tensors('llama').items()}
  width = tensors['model.embed_tokens.weight'].shape[1]
  table = np.random.default_rng(0).standard_normal((450, width)).astype(np.float32)
  tensors |= {n: table for n in ('model.embed_tokens.weight', 'lm_head.weight') if n in tensors}
  folder = hf_folders.write(tmp_path / 'folder', hf_folders.settings('llama') | {
      'vocab_size': 450, 'bos_token_id': None, 'eos_token_id': None}, [tensors])
  make(folder)
  gguf_write.write(folder, tmp_path / 'model.gguf')
  file = gguf.GGUFWeights(tmp_path / 'model.gguf')
  ours, theirs = file.tokenizer(), tokenizers.load(folder)
  assert file.config['vocab_size'] == 450
  fields = library.GGUFReader(tmp_path / 'model.gguf').fields
  assert len(fields['tokenizer.ggml.tokens'].data) == 450
  assert pre is None or fields['tokenizer.ggml.pre'].contents() == pre
  for name in ('bos_id', 'eos_id', 'eos_ids', 'adds_bos', 'vocab_size'):
    assert getattr(ours, name) == getattr(theirs, name), name
  for text in (TEXT, 'so<pause>it', '<bos> so', "HE'LL 12345"):
    assert ours.encode(text).tolist() == theirs.encode(text).tolist()


def test_an_exports_record_comes_along(tmp_path):
  _, file = written('llama', tmp_path, lns_jax={'scheme': 'lns', 'alpha': [1.5]})
  assert file.config['lns_jax'] == {'scheme': 'lns', 'alpha': [1.5]}


def test_a_file_that_is_not_the_model_does_not_stay(tmp_path):
  tensors = hf_folders.tensors('llama')
  tensors['model.layers.0.mlp.up_proj.weight'] *= 1e6  # more than float16 holds
  folder = hf_folders.write(tmp_path / 'folder', hf_folders.settings('llama'), [tensors])
  with pytest.raises(UserError, match='up_proj.weight read again is another'):
    gguf_write.write(folder, tmp_path / 'model.gguf', dtype='float16')
  assert [p.name for p in tmp_path.iterdir()] == ['folder']


def test_what_gguf_cannot_say_is_refused(tmp_path):
  out = tmp_path / 'o.gguf'
  for name, changes, words in (
      ('mistral', {}, ['sliding window of', 'llama']), ('llama_rope_dynamic', {}, ['dynamic']),
      ('llama_rope_yarn_set', {}, ['yarn', 'mscale']),
      ('vit', {}, ["'vit'", 'qwen2']), ('gpt2', {'activation_function': 'gelu'}, ['gelu'])):
    with pytest.raises(UserError) as error:
      gguf_write.write(hf_folders.folder(name, tmp_path / f'{name}', **changes), out)
    assert all(w in str(error.value) for w in words) and '\n' not in str(error.value), error.value
    assert not list(tmp_path.glob('*.gguf*'))
  folder = hf_folders.folder('llama', tmp_path)
  with pytest.raises(UserError, match="'int4'.*q8_0"):
    gguf_write.write(folder, out, dtype='int4')
  with pytest.raises(UserError, match='does not end in .gguf'):
    gguf_write.write(folder, tmp_path / 'o')
  out.write_text('')
  with pytest.raises(UserError, match='exists'):
    gguf_write.write(folder, out)


def test_a_tokenizer_without_merges_comes_along(tmp_path):
  folder, out = hf_folders.of_text(tmp_path), tmp_path / 'model.gguf'
  gguf_write.write(folder, out)
  assert load.load(out)[2].encode('naïve 🙂').tolist() == list('naïve 🙂'.encode())


def test_a_file_that_lost_its_merges_is_refused(tmp_path, monkeypatch):
  folder = hf_folders.of_text(tmp_path, tokenizer=tokenizers.train_bpe(['abc abc abc'], 262))
  fields = gguf_tokenizer.fields
  monkeypatch.setattr(gguf_tokenizer, 'fields', lambda *a: {**fields(*a), 'tokenizer.ggml.merges': []})
  with pytest.raises(UserError, match='lacks the field tokenizer.ggml.merges'):
    gguf_write.write(folder, tmp_path / 'model.gguf')


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_a_number_that_is_not_finite_is_named(value, tmp_path):
  found = hf_folders.tensors('llama')
  name = 'model.layers.1.mlp.up_proj.weight'
  found[name][0, 0] = value
  folder = hf_folders.write(tmp_path / 'hf', hf_folders.settings('llama'), [found])
  with pytest.raises(UserError, match=f'{name} has a number that is not finite'):
    gguf_write.write(folder, tmp_path / 'model.gguf')
  assert not list(tmp_path.glob('model*'))


def test_a_place_that_cannot_be_is_a_sentence(tmp_path, monkeypatch):
  folder = hf_folders.folder('llama', tmp_path)
  (tmp_path / 'link.gguf').symlink_to(tmp_path / 'nowhere')
  for out, words in [('link.gguf', 'exists'), ('llama/config.json/a.gguf', 'cannot be made'),
                     (f'{"x" * 300}.gguf', '300 bytes|305 bytes')]:
    with pytest.raises(UserError, match=words):
      gguf_write.write(folder, tmp_path / out)
  def full(*_):
    raise OSError(28, 'No space left on device')
  monkeypatch.setattr(library.GGUFWriter, 'write_tensor_data', full)
  with pytest.raises(UserError, match='No space left on device; nothing is left'):
    gguf_write.write(folder, tmp_path / 'new' / 'a.gguf')
  assert not (tmp_path / 'new').exists()


def test_a_run_folder_is_told_the_way(tmp_path):
  (tmp_path / 'run' / 'checkpoints').mkdir(parents=True)
  with pytest.raises(UserError, match='export_hf.py --workdir='):
    gguf_write.write(tmp_path / 'run', tmp_path / 'a.gguf')
