"""Sentences follow the numbers, whichever way they point."""

import numpy as np
import pytest

from lns_jax.depth import findings


@pytest.mark.parametrize('value, text', [
    (1234.5, '1,234'), (100, '100'), (18.94, '18.9'), (2.3, '2.30'), (0.0069, '0.00690'), (0, '0'), (-0.5, '-0.500'),
    (None, '–'), (float('nan'), '–'), (float('inf'), '–')])
def test_numbers_keep_three_digits(value, text):
  assert findings.number(value) == text


def test_lists_read_as_english():
  assert [findings.listed(x) for x in (['a'], ['a', 'b'], ['a', 'b', 'c'])] == ['a', 'a and b', 'a, b and c']


def test_the_lower_loss_is_named_whichever_scheme_has_it():
  say = lambda pre, lns: findings.losses({'pre': {'val_loss': pre}, 'lns': {'val_loss': lns}})
  assert say(4.0, 3.0).startswith('lns ended with the lower validation loss, 3.0000 nats per token, 1.0000 (25.0%) '
                                  'below pre (4.0000); this is one seed')
  assert say(3.0, 4.0).startswith('pre ended with the lower validation loss, 3.0000')
  assert 'agree to four decimals (3.0000)' in say(3.00001, 3.00002)


def test_a_diverged_model_is_not_compared():
  schemes = {'a': {'val_loss': None, 'diverged': True, 'reason': 'nan at step 3.'}, 'b': {'val_loss': 2.0}}
  assert findings.losses(schemes) == ('b reached a validation loss of 2.0000 nats per token; there is no other model '
                                      'to compare it with.')
  assert findings.divergences(schemes) == ['a diverged, so it has no final loss and no measures: nan at step 3.']
  assert findings.losses({'a': schemes['a']}) == 'No model reached the end of its training.'


def test_of_many_models_the_lowest_and_the_highest_are_named():
  said = findings.losses({'a': {'val_loss': 3.0}, 'b': {'val_loss': 2.0}, 'c': {'val_loss': 4.0}})
  assert said.startswith('b ended with the lowest validation loss, 2.0000 nats per token, 2.0000 (50.0%) below the '
                         'highest, that of c (4.0000)')


def test_removable_layers_are_those_below_one_percent_of_the_models_own_loss():
  found = {'layers': 4, 'layer_ids': [1, 2, 3, 7], 'baseline': 4.0, 'layer_drop': [0.039, 0.041, -0.1, 0.4]}
  assert findings.removable(found) == 2  # 1% of 4 nats is 0.04
  np.testing.assert_allclose(findings.percent(found, found['layer_drop']), [0.975, 1.025, -2.5, 10])
  count, dearest = findings.removal({'x': found})
  assert '2 of 4 layers in x raise the loss by less than 1%' in count
  assert dearest == 'The layer that costs most is layer 7 (+10.0%) in x.'  # by its own number, not its position


def test_task_accuracy_counts_cheap_layers_and_says_when_the_model_guesses():
  def found(low, chance):
    return {'layers': 3, 'task_baseline': 0.4, 'task_drop': [-0.2, -0.009, 0.01], 'task': {'chance': chance},
            'intervals': {'task_baseline': {'low': low, 'high': 0.5}}}
  said = findings.task({'x': found(0.3, 0.25)})
  assert said == ('x is right on 40.0% (30.0 to 50.0), and 2 of its 3 layers, taken out one at a time, cost it less '
                  'than one percentage point. Guessing would be right on 25.0%.')
  both = findings.task({'x': found(0.2, 0.25), 'y': found(0.3, 0.25)})
  assert both.endswith(' x cannot be told from guessing, so that no layer of it can be seen to matter.')
  assert 'uessing' not in findings.task({'x': found(0.2, None)})


def test_last_variance_ratio_and_growth():
  schemes = {'x': {'variance': [0.5, 2.0, 20.0]}, 'y': {'variance': [0.5, 2.0, 4.0]}, 'z': {'diverged': True}}
  assert findings.last_variance(schemes) == (
      'The output variance of the last layer is 20.0 in x and 4.00 in y, a ratio of 5.00.')
  assert findings.variance_growth(schemes) == (
      "The last layer's variance over the first layer's is 10.0 in x and 2.00 in y.")


def test_halves_are_medians_and_the_middle_layer_belongs_to_the_first():
  said = findings.halves({'x': {'m': [9.0, 1.0, 2.0, 5.0, None]}}, 'm', 'm')
  assert said.endswith('m goes from 2.00 to 5.00 in x.')


def test_a_count_of_layers_has_whole_ends():
  assert findings.counted(7.0, 5.0, 7.525) == '7 (5 to 8)' and findings.counted(3.0, 1.9, 3.0) == '3 (1 to 3)'
  assert findings.counted(3.0, None, None) == '3' and findings.counted(None, None, None) == '–'


def _prunable(**measured):
  ends = {key: {'low': value - 1, 'high': value + 0.5} for key, value in measured.items()}
  return {'layers': 16, **measured, 'intervals': ends}


def test_the_headline_says_how_many_layers_could_go_alone_and_together():
  models = {'x': _prunable(removable=12.0, prunable=4.0), 'y': _prunable(removable=14.0), 'z': _prunable(prunable=2.0)}
  assert findings.headline(models | {'w': _prunable()}) == (
      'At less than 1% more loss, and without any retraining, x can lose any one of 12 (11 to 13) of its 16 layers, or 4 '
      '(3 to 5) together; y can lose any one of 14 (13 to 15) of its 16 layers; z can lose 2 (1 to 3) of its 16 '
      'layers together.')
  assert findings.headline({'w': _prunable()}) == ''


def test_what_a_quarter_and_half_of_the_layers_cost_together():
  rise = [0.01, -0.02, 0.04, 0.4]
  found = {'layers': 5, 'prune_baseline': 4.0, 'prune_rise': rise, 'intervals': {
      'prune_rise': {'low': [v - 0.02 for v in rise], 'high': [v + 0.04 for v in rise]}}}
  # A quarter of 5 layers is one, 0.01 of 4 nats; half are two, -0.02 of 4 nats.
  assert findings.together({'x': found, 'y': {'layers': 5}}) == (
      'Rise of the loss when the layers that cost least are taken out together: '
      'in x +0.2% (-0.2 to +1.2) without 1, -0.5% (-1.0 to +0.5) without 2.')
  assert findings.together({'x': found | {'layers': 3}}) == ''
