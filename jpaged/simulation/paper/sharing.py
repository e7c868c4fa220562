"""Fig. 15: blocks that parallel sampling saves, by the engine's own sharing. Simulated, block by block."""

from __future__ import annotations

from typing import Any

from jpaged.simulation.paper.setting import draw, serve

PAPER = {"alpaca": "6.1 to 9.8", "sharegpt": "16.2 to 30.5"}  # percent, over 2, 4 and 6 outputs
RATES = {"alpaca": 4.0, "sharegpt": 0.3}


def savings() -> list[dict[str, Any]]:
    rows = []
    for name in ("alpaca", "sharegpt"):
        for outputs in (2, 4, 6):
            jobs = draw(name, RATES[name], 80 if name == "alpaca" else 600, outputs=outputs)
            report = serve("jpaged", jobs, since=0, until=600)
            row = {"lengths": name, "outputs": outputs, "saved": 100 * report.mean_saved}
            rows.append(row | {"paper": PAPER[name]})
    return rows
