"""The paper's opening picture: computed, stored, and refused for posteriors that are none."""

import numpy as np
import pytest

from analysis import drawing
from fl_lightning.errors import UserError
from tune.study_file import read


def test_the_picture_is_computed_and_stored(out):
    scene, folder = drawing.draw(read("ridge_demo"), out)
    assert {path.suffix for path in folder.glob("ridge_*")} == {".png", ".svg", ".pdf"}
    rows = {row["point"]: row for row in drawing.rows(scene)}
    average, product = rows["mean of the means (FedAvg)"], rows["mode of the product (FOLA)"]
    assert float(product["mixture density"]) > 5 * float(average["mixture density"])
    with np.load(folder / "landscape.npz") as file:
        arrays = dict(file)
    assert arrays["mixture"].shape == (len(arrays["y"]), len(arrays["x"]))
    nearest = np.abs(arrays["ridge"][None] - arrays["critical"][:, None]).sum(-1).min(1)
    assert (nearest < 0.05).all()  # every critical point lies on the ridge


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("means: [[0, 0]]", "means of 2 x 2"),
        ("covariances: [[[1, 2], [2, 1]], [[1, 0], [0, 1]]]", "positive definite"),
        ("weight: 1.5", r"weight must lie in \[0, 1\]"),
    ],
)
def test_what_is_no_posterior_is_refused(changes, message, tmp_path, out):
    text = "draw:\n  means: [[-1, 0], [1, 1]]\n  covariances: [[[1, 0], [0, 1]], [[1, 0], [0, 1]]]\n"
    key = changes.partition(":")[0]
    kept = [line for line in text.splitlines() if not line.strip().startswith(f"{key}:")]
    (tmp_path / "mine.yaml").write_text("\n".join([*kept, f"  {changes}"]))
    with pytest.raises(UserError, match=message):
        drawing.draw(read(str(tmp_path / "mine.yaml")), out)
