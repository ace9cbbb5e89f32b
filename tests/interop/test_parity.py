"""Stock transformers opens what `export` writes, and computes, generates and tokenises the same."""

import numpy as np
import pytest

import hf_folders
import lns_jax
from interop.test_export import CLASSES
from interop.test_save import run_folder
from lns_jax.data import tokenizers
from lns_jax.interop.export import export
from tiny import model

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')
pytestmark = pytest.mark.parity

FOLDABLE = ('pre', 'lns', 'lns_init', 'lns_learned', 'lns_stabilised', 'branch_lns', 'layerscale', 'skipinit', 'rezero',
            'prores', 'completep')
TOKENS = np.random.default_rng(0).integers(0, 258, (2, 24))


def stock(folder, auto=None):
  """The stock model, in float32; nothing is missing or left over."""
  auto = auto or transformers.AutoModelForCausalLM
  found, info = auto.from_pretrained(folder, output_loading_info=True, dtype=torch.float32, attn_implementation='eager')
  assert not any(info.values()), info
  return found.eval()


def logits(found, tokens, **kwargs) -> np.ndarray:
  with torch.no_grad():
    return found(torch.from_numpy(np.asarray(tokens)).long(), **kwargs).logits.numpy()


def close(folder, config, params, tokens=TOKENS):
  wanted = np.asarray(lns_jax.forward(config, params, tokens))
  assert np.abs(wanted).max() > 0.5
  np.testing.assert_allclose(logits(stock(folder), tokens), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize('scheme', FOLDABLE)
def test_a_folded_scheme_in_stock_llama(scheme, tmp_path):
  changes = {'base_width': 32, 'base_depth': 1} if scheme == 'completep' else {}
  run = run_folder(tmp_path / 'run', model(vocab_size=258, scheme=scheme, num_layers=4, **changes))
  export(run, tmp_path / 'hf', shard_size='100kB')
  assert type(stock(tmp_path / 'hf')).__name__ == 'LlamaForCausalLM'
  close(tmp_path / 'hf', *lns_jax.load(run)[:2])


@pytest.mark.parametrize('changes, model_type', [c for c in CLASSES if c[1] != 'vit'])
def test_every_class(changes, model_type, tmp_path):
  config = model(**{'vocab_size': 258, 'num_layers': 4, 'max_positions': 64, **changes})
  run = run_folder(tmp_path / 'run', config)
  assert export(run, tmp_path / 'hf')['model_type'] == model_type
  close(tmp_path / 'hf', *lns_jax.load(run)[:2])


def test_vit(tmp_path):
  changes = next(c for c, model_type in CLASSES if model_type == 'vit')
  run = run_folder(tmp_path / 'run', model(**changes, scheme='lns', num_layers=3))
  export(run, tmp_path / 'hf')
  config, params, _ = lns_jax.load(run)
  images = np.random.default_rng(0).standard_normal((2, 8, 8, 1)).astype(np.float32)
  found = stock(tmp_path / 'hf', transformers.AutoModelForImageClassification)
  with torch.no_grad():
    ours = found(torch.from_numpy(images).permute(0, 3, 1, 2)).logits.numpy()
  np.testing.assert_allclose(ours, lns_jax.forward(config, params, images), atol=1e-4, rtol=0)


@pytest.mark.parametrize('name', ['qwen3', 'qwen2_window_types', 'gpt2', 'mistral', 'llama_rope_llama3'])
def test_a_removed_layer(name, tmp_path):
  """Known faults R5 and R1: renumbered, loaded whole, the same logits, and greedy text with cache as without."""
  path = hf_folders.folder(name, tmp_path)
  export(path, tmp_path / 'less', drop_layers=[2])
  config, params = lns_jax.remove_layers(*lns_jax.load(path)[:2], [2])
  tokens = hf_folders.reference(name)['inputs']
  close(tmp_path / 'less', config, params, tokens)
  found = stock(tmp_path / 'less')
  if hasattr(found.config, 'layer_types'):
    assert len(found.config.layer_types) == found.config.num_hidden_layers == config.num_layers
  prompt = torch.from_numpy(tokens[:, :6]).long()
  options = dict(max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=0,
                 eos_token_id=None, attention_mask=torch.ones_like(prompt))
  with torch.no_grad():
    cached, plain = (found.generate(prompt, use_cache=use, **options) for use in (True, False))
  assert torch.equal(cached.sequences, plain.sequences)
  for a, b in zip(cached.logits, plain.logits):
    np.testing.assert_allclose(a, b, atol=1e-5, rtol=0)
  wanted = np.asarray(lns_jax.forward(config, params, cached.sequences.numpy()))[:, 5:-1]
  np.testing.assert_allclose(np.stack([x.numpy() for x in cached.logits], 1), wanted, atol=1e-4, rtol=0)


TEXTS = ('Every scheme is a row of one equation.', '  spaces\n\n\ttabs', 'naïve 例 🙂', 'x' * 50)


@pytest.mark.parametrize('kind', ['byte', 'bpe'])
def test_the_stock_tokenizer_gives_the_same_ids_behind_bos(kind, tmp_path):
  corpus = ['the quick brown fox is a row of one equation ' * 20, *TEXTS]
  ours = tokenizers.byte_tokenizer() if kind == 'byte' else tokenizers.train_bpe(corpus, 300)
  run = run_folder(tmp_path / 'run', model(vocab_size=300), tokenizer=ours)
  export(run, tmp_path / 'hf')
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'hf')
  for text in TEXTS:
    assert theirs(text, add_special_tokens=False).input_ids == ours.encode(text).tolist()
    assert theirs(text).input_ids == [ours.bos_id, *ours.encode(text)]
    assert theirs.decode(theirs(text).input_ids, skip_special_tokens=True) == text
  assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)


@pytest.mark.parametrize('kind', ['bpe', 'unigram'])
def test_the_stock_tokenizer_of_a_sentencepiece_model(kind, tmp_path):
  import io
  import sentencepiece
  proto = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter([TEXTS[0], 'a row of words', 'words of a row'] * 5), model_writer=proto, vocab_size=60,
      model_type=kind, minloglevel=2, hard_vocab_limit=False)
  ours = tokenizers.SentencePieceTokenizer(proto.getvalue())
  run = run_folder(tmp_path / 'run', model(vocab_size=300), tokenizer=ours)
  export(run, tmp_path / 'hf')
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'hf')
  for text in (TEXTS[0], 'words of one row'):
    assert theirs(text, add_special_tokens=False).input_ids == ours.encode(text).tolist()
    assert theirs(text).input_ids == [ours.bos_id, *ours.encode(text)]


def test_bfloat16_shards(tmp_path):
  run = run_folder(tmp_path / 'run', model(vocab_size=258, scheme='lns', num_layers=4))
  found = export(run, tmp_path / 'hf', dtype='bfloat16', shard_size='50kB')
  assert len(found['files']) > 1
  config, params, _ = lns_jax.load(run)
  difference = logits(stock(tmp_path / 'hf'), TOKENS) - np.asarray(lns_jax.forward(config, params, TOKENS))
  assert 1e-4 < np.abs(difference).max() < 0.3
