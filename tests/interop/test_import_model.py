"""A stored model becomes a run folder that every command opens and training goes on from."""

import importlib.util
import json
import subprocess

import jax
import numpy as np
import pytest

import hf_folders
import lns_jax
from hf_folders import folder, reference, settings, tensors, write
from lns_jax import UserError, presets, runs
from lns_jax import config as config_lib
from lns_jax.data import dataset, tokenizers
from lns_jax.interop import from_bin, import_model
from lns_jax.train import init_from
from test_cli import command


def with_tokenizer(tmp_path):
  """A Llama of 300 tokens with a byte tokenizer beside it."""
  rng = np.random.default_rng(0)
  wide = {n: rng.standard_normal((300, 24)).astype(np.float32) for n in ('model.embed_tokens.weight', 'lm_head.weight')}
  path = write(tmp_path / 'hf', settings('llama') | {'vocab_size': 300}, [tensors('llama') | wide])
  tokenizers.byte_tokenizer().save(path)
  return path


def test_weights_settings_and_tokenizer_are_those_of_the_folder(tmp_path):
  path = with_tokenizer(tmp_path)
  found = import_model.import_model(path, tmp_path / 'run')
  config, params, tokenizer = lns_jax.load(path)
  again, same, its_own = lns_jax.load(tmp_path / 'run')
  assert again == config and its_own.hash == tokenizer.hash
  jax.tree.map(np.testing.assert_array_equal, same, params)
  assert found['params'] == sum(x.size for x in jax.tree.leaves(params)) and found['tokenizer'] == 'byte'
  origin = json.loads((tmp_path / 'run' / 'run_info.json').read_text())['origin']
  assert origin['path'] == str(path)


def test_it_is_evaluated_and_trained_on_from_its_config_file(tmp_path):
  import_model.import_model(with_tokenizer(tmp_path), tmp_path / 'run')
  loss = runs.evaluate(tmp_path / 'run', max_tokens=512)['loss']
  assert np.isfinite(loss)
  result = command('experiments/pretrain.py', f'--config={tmp_path}/run/config.py', f'--workdir={tmp_path}/on',
                   '--config.train.steps=1', '--config.optimizer.lr=1e-12', '--config.optimizer.warmup_steps=0',
                   '--config.eval.max_tokens=512')
  assert result.returncode == 0, result.stderr
  assert json.loads(result.stdout.splitlines()[-1])['loss'] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize('scheme', ['lns', 'branch_lns'])
def test_a_retrofit_keeps_the_function_and_takes_the_scheme(scheme, tmp_path):
  path = folder('llama', tmp_path)
  import_model.import_model(path, tmp_path / 'run', retrofit=scheme)
  config, params, _ = lns_jax.load(tmp_path / 'run')
  assert config.scheme == scheme
  right = reference('llama')
  np.testing.assert_allclose(lns_jax.forward(config, params, right['inputs']), right['logits'], **hf_folders.CLOSE)
  gain = params['layers']['2']['attn_in_norm']['gain']
  factor = 2 ** 0.5 if scheme == 'lns' else 1
  np.testing.assert_allclose(gain, factor * tensors('llama')['model.layers.1.input_layernorm.weight'], rtol=1e-6)


def test_a_scheme_that_the_weights_were_trained_with_leaves_them_as_they_are(tmp_path):
  path = folder('llama', tmp_path)
  import_model.import_model(path, tmp_path / 'run', scheme='lns')
  config, params, _ = lns_jax.load(tmp_path / 'run')
  assert config.scheme == 'lns'
  np.testing.assert_array_equal(params['layers']['2']['attn_in_norm']['gain'],
                                tensors('llama')['model.layers.1.input_layernorm.weight'])
  right = reference('llama')
  assert np.abs(lns_jax.forward(config, params, right['inputs']) - right['logits']).max() > 0.1


def test_without_a_tokenizer_there_is_nothing_to_evaluate_on(tmp_path):
  import_model.import_model(folder('gpt2', tmp_path), tmp_path / 'run')
  assert lns_jax.load(tmp_path / 'run')[2] is None
  with pytest.raises(UserError, match='without a tokenizer'):
    runs.evaluate(tmp_path / 'run')


def test_without_a_tokenizer_training_on_wants_the_one_whose_tokens_the_model_knows(tmp_path, capsys):
  path = with_tokenizer(tmp_path)
  for file in path.glob('*token*'):
    file.rename(tmp_path / file.name)
  import_model.import_model(path, tmp_path / 'run')
  config = presets.resolve(presets.from_run(tmp_path / 'run'))
  with pytest.raises(UserError, match="there is no tokenizer at '.*run/tokenizer'; give the file of the one whose"):
    dataset.open(config)
  config = config_lib.changed(config, {'data': {'tokenizer': str(tmp_path / 'tokenizer.json')}})
  init_from.check_tokenizer(config, dataset.open(config).tokenizer)
  assert 'has no tokenizer, so that it cannot be compared' in capsys.readouterr().err


@pytest.mark.parametrize('arguments, words', [
    (dict(scheme='lnss'), ['lnss', 'lns']), (dict(retrofit='lns_learned'), ['lns_learned', 'lns']),
    (dict(retrofit='peri'), ['peri']), (dict(seq_len=4096), ['4096', '64'])])
def test_a_mistake_is_one_sentence_and_leaves_nothing(arguments, words, tmp_path):
  path = folder('llama', tmp_path)
  with pytest.raises(UserError) as error:
    import_model.import_model(path, tmp_path / 'run', **arguments)
  assert all(word in str(error.value) for word in words)
  assert [p.name for p in tmp_path.iterdir()] == ['llama']


def test_nothing_is_written_over_and_a_run_is_no_import(tmp_path):
  path = folder('llama', tmp_path)
  import_model.import_model(path, tmp_path / 'run')
  with pytest.raises(UserError, match='exists'):
    import_model.import_model(path, tmp_path / 'run')
  with pytest.raises(UserError, match='run folder already'):
    import_model.import_model(tmp_path / 'run', tmp_path / 'other')


def test_the_config_file_of_a_run_is_its_settings(tmp_path):
  import_model.import_model(with_tokenizer(tmp_path), tmp_path / 'run')
  config = presets.load_config(str(tmp_path / 'run' / 'config.py'))
  assert config.model == lns_jax.load(tmp_path / 'run')[0]
  assert config.train.init_from == str(tmp_path / 'run')
  assert config.data.tokenizer == str(tmp_path / 'run' / 'tokenizer')


@pytest.mark.parametrize('arguments', [[], ['--model=a'], ['--model=a', '--out=b'], ['--from_bin=a', '--workdir=b']])
def test_the_command_wants_one_pair_of_flags(arguments):
  result = command('experiments/import_hf.py', *arguments)
  assert result.returncode == 1 and '--model and --workdir, or --from_bin and --out' in result.stderr


@pytest.mark.parity
@pytest.mark.skipif(not importlib.util.find_spec('torch'), reason='needs torch')
def test_pickles_become_safetensors_and_code_in_them_is_refused(tmp_path):
  import torch
  source = tmp_path / 'old'
  source.mkdir()
  (source / 'config.json').write_text(json.dumps(settings('llama')))
  items = [(n, torch.from_numpy(x)) for n, x in tensors('llama').items()]
  names = ['pytorch_model-00001-of-00002.bin', 'pytorch_model-00002-of-00002.bin']
  for file, part in zip(names, (items[::2], items[1::2])):
    torch.save(dict(part), source / file)
  (source / 'pytorch_model.bin.index.json').write_text(json.dumps({'weight_map': {
      n: names[i % 2] for i, (n, _) in enumerate(items)}}))
  (source / 'modeling_evil.py').write_text('raise SystemExit')
  (source / 'model.safetensors.index.json').write_text('{"weight_map": {"a": "gone.safetensors"}}')  # of other files
  assert from_bin.convert(source, tmp_path / 'new')['tensors'] == len(items)
  assert not (tmp_path / 'new' / 'modeling_evil.py').exists()
  config, params, _ = lns_jax.load(tmp_path / 'new')
  right = reference('llama')
  np.testing.assert_allclose(lns_jax.forward(config, params, right['inputs']), right['logits'], **hf_folders.CLOSE)
  torch.save({'x': subprocess.Popen}, source / names[0])
  with pytest.raises(UserError, match='tensors alone'):
    from_bin.convert(source, tmp_path / 'evil')
  assert not (tmp_path / 'evil').exists()
