"""The schedule of decode attention by teams: every position once, and the same work for all."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from twostroke.kernels.decode_schedule import BEGIN, END, LANE, ROW, SPLIT, SPLITS
from twostroke.kernels.team_schedule import NEXT, PART, TeamSchedule, make_team_schedule

# The interpreter of triton 3.6 relies on what numpy 2.3 announces to drop.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE = 16
SHARE_ENDS, NEAR = 3, 3


def teams_of(lengths, *, teams, window=0, min_share=4):
    """Make a schedule and return the records of each team."""
    lane_lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    rows = torch.arange(100, 100 + len(lengths), dtype=torch.int32, device=DEVICE)
    schedule = TeamSchedule.empty(len(lengths), teams, torch.device(DEVICE))
    schedule.words.fill_(-7)
    make_team_schedule(schedule, rows, lane_lengths, window=window, tile=TILE, min_share=min_share)
    lines, chains = schedule.words.tolist(), []
    for team in range(teams):
        chain = [lines[team]] if lines[team][LANE] >= 0 else []
        assert lines[team][LANE] >= -1
        while chain and chain[-1][NEXT]:
            assert chain[-1][NEXT] >= teams
            chain.append(lines[chain[-1][NEXT]])
        chains.append(chain)
    return chains


def tiles_of(record):
    return -(-record[END] // TILE) - record[BEGIN] // TILE if record[BEGIN] < record[END] else 0


BATCHES = {
    "one": [700],
    "edges": [0, 1, 2, TILE, TILE + 1, TILE + 2, 2 * TILE + 1],
    "dead": [0] * 5,
    "dead at the end": [300] * 9 + [0] * 7,
    "equal": [225] * 12,
    "many": [222] * 130,
    "long among short": [20] * 15 + [2_000] + [20] * 15,
    "ragged": [(37 * i * i) % 800 for i in range(50)],
    "few ragged": [900, 1, 20, 500, 90, 1_700, 16, 300],
}


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("teams", [1, 7, 33])
@pytest.mark.parametrize("window", [0, 1, 40])
def test_teams_read_what_each_lane_sees_once(lengths, teams, window):
    shares, parts = {}, set()
    for team, chain in enumerate(teams_of(lengths, teams=teams, window=window)):
        for record in chain:
            assert record[ROW] == 100 + record[LANE]
            shares.setdefault(record[LANE], []).append((team, record))
    assert sorted(shares) == list(range(len(lengths)))
    for lane, own in shares.items():
        length = lengths[lane]
        position = max(length - window, 0) if window else 0
        first_team = own[0][0]
        for split, (team, record) in enumerate(own):
            assert team == first_team + split
            assert (record[SPLIT], record[SPLITS]) == (split, len(own) if length else 0)
            if length > 1 and window != 1:
                assert record[BEGIN] == position < record[END]
                assert split == 0 or position % TILE == 0
            if len(own) > 1:
                assert record[PART] == own[0][1][PART]
                assert record[PART] + split not in parts
                parts.add(record[PART] + split)
            position = max(record[END], position)
        assert position == max(length - 1, 0)
    assert max(parts, default=0) < 2 * teams


@pytest.mark.parametrize("name", ["many", "ragged", "few ragged", "long among short"])
def test_teams_have_about_the_same_work(name):
    chains = teams_of(BATCHES[name], teams=11)
    costs = [sum(tiles_of(record) for record in chain) for chain in chains]
    tiles = [-(-(length - 1) // TILE) for length in BATCHES[name]]
    equal = (sum(tiles) + SHARE_ENDS * len(tiles)) / 11
    assert max(costs) <= equal + NEAR + 1
    crumbs = [tiles_of(record) for chain in chains for record in chain if record[SPLITS] > 1]
    assert crumbs
    assert min(crumbs) >= NEAR


def test_few_lanes_of_one_length_are_cut_into_equal_parts_of_a_team_each():
    chains = teams_of([449] * 8, teams=17)
    assert [len(chain) for chain in chains] == [1] * 16 + [0]
    assert {tiles_of(chain[0]) for chain in chains[:16]} == {14}
