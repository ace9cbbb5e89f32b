"""One line a model: how much of its depth could go, how much of it is used."""

from collections.abc import Mapping

from lns_jax.depth.findings import counted, number

COUNTS = ('removable', 'prunable', 'effective_depth_kl')  # of layers

# Key of depth.json -> heading. All have intervals.
COLUMNS = {
    'removable': 'layers removable one at a time, loss up by < 1 %',
    'prunable': 'layers removable together, loss up by < 1 %',
    'effective_depth_kl': 'effective depth (logit lens)',
    'last_third': 'share of the last third in the loss of removals',
}


def of(found: dict) -> dict:
  """depth.json of a model -> {'layers', 'tokens', 'loss', 'bits_per_byte', and of COLUMNS [value, low, high]}.

  What was not measured is left out.
  """
  card = {'layers': found['layers'], 'tokens': found['tokens'], 'loss': found.get('baseline')}
  card |= {key: found[key] for key in ('bits_per_byte',) if found.get(key) is not None}
  for key in COLUMNS:
    if key in found:
      interval = found['intervals'][key]
      card[key] = [found[key], interval['low'], interval['high']]
  return card


def _cell(card: dict, key: str) -> str:
  if key not in card:
    return '–'
  if key in COUNTS:
    return counted(*card[key])
  value, low, high = map(number, card[key])
  return f'{value} ({low} to {high})'


def rows(models: Mapping[str, dict]) -> tuple[list[str], list[list[str]]]:
  """(headings, one row a model) as text; models: name -> depth.json."""
  cards = {name: of(found) for name, found in models.items()}
  losses = {'loss': 'loss'} | ({'bits_per_byte': 'bits per byte'} if any('bits_per_byte' in c for c in cards.values())
                               else {})
  loss = lambda card, key: f'{card[key]:.4f}' if card.get(key) is not None else '–'
  heads = ['model', 'layers', *losses.values(), *COLUMNS.values()]
  return heads, [[name, str(card['layers']), *(loss(card, key) for key in losses),
                  *(_cell(card, key) for key in COLUMNS)] for name, card in cards.items()]


def markdown(models: Mapping[str, dict]) -> str:
  """The table for a page of docs: paste a row there to add a model."""
  heads, lines = rows(models)
  escaped = [[cell.replace('|', r'\|') for cell in line] for line in lines]
  return '\n'.join(f'| {" | ".join(line)} |' for line in (heads, ['---'] * len(heads), *escaped)) + '\n'
