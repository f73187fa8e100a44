"""How many tokens are read at once: by what steps took and how often proposals were right."""

from llmcli.engine.speculation import Pace


def made(prior=0.6, **seconds):
    pace = Pace(prior)
    for rows, each in seconds.items():
        for _ in range(5):
            pace.took(int(rows[1:]), each)
    return pace


def test_nothing_is_drafted_before_a_step_was_measured():
    assert Pace(0.6).rows(0, 16) == 1


def test_proposals_that_are_right_are_read_in_large_pieces():
    pace = made(_1=1.0, _4=1.6, _8=2.4, _16=4.6)
    for _ in range(60):
        pace.saw(0, True)
    assert pace.rows(0, 16) == 16
    assert pace.rows(0, 15) == 8
    assert pace.rows(0, 1) == 1


def test_proposals_that_are_wrong_end_soon_and_are_tried_now_and_then():
    pace = made(_1=1.0, _4=1.5)
    tried = 0
    for _ in range(400):
        if pace.rows(0, 4) > 1:
            tried += 1
            pace.saw(0, False)
    assert 2 <= tried <= 12


def test_what_is_known_of_one_ground_is_not_of_another():
    pace = made(_1=1.0, _4=1.5)
    for _ in range(20):
        pace.saw(2, False)
    assert (pace.rows(2, 4), pace.rows(4, 4)) == (1, 4)


def test_what_has_to_be_recorded_first_has_to_promise_more():
    unknown, known = made(prior=0.45, _1=1.0), made(prior=0.45, _1=1.0, _4=1.45)
    assert (unknown.rows(0, 4), known.rows(0, 4)) == (1, 4)


def test_a_draft_that_takes_as_long_as_the_model_is_not_asked():
    pace = made(_1=1.0, _4=1.2)
    assert pace.rows(0, 4) > 1
    pace.drafted(1.0)
    assert pace.rows(0, 4) == 1
    asked = [pace.rows(0, 4) > 1 for _ in range(400)]
    assert asked[-1], "it may have been a neighbour that took the time"
    assert not any(asked[:20])
