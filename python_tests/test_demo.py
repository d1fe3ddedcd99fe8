"""`oases demo` on a machine that was busy."""

from oases.simulator.timeline import Span, Timeline
from oases_train import demo_command as demo


def result(of_ideal):
    row = {"step_seconds": 0.5, "speedup": 1.4, "tokens_per_second": 100.0, "hidden": 0.9, "losses": [2.0]}
    return {
        "config": {"layers": 2, "hidden": 32, "batch": 4, "sequence": 16, "tp": 2},
        "schedules": {
            name: {**row, "of_ideal": share, "validation_loss": 2.0}
            for name, share in zip(("sync", "oases"), of_ideal, strict=True)
        },
        "largest_loss_difference": 1e-7,
        "timelines": [Timeline(name, (Span(0, "compute", "F 0.0", 0.0, 1.0),)) for name in ("sync", "oases")],
    }


def test_a_page_beyond_the_ideal_says_that_it_is_void(tmp_path, capsys):
    demo.show(result((1.54, 3.11)), "a link", tmp_path)
    page = (tmp_path / "oases-report.html").read_text()
    said = " ".join(capsys.readouterr().out.split())
    for text in (page, said):
        assert "This measurement is void: 154 % (sync) and 311 % (oases) of the ideal speed" in text
        assert "run the demo again on an idle machine" in text
    assert "A void measurement: the machine was busy" in page
    assert "1.40 x as fast" not in page


def test_a_page_within_the_ideal_has_the_speedup_as_its_title(tmp_path, capsys):
    demo.show(result((0.7, 1.04)), "a link", tmp_path)
    assert "oases is 1.40 x as fast" in (tmp_path / "oases-report.html").read_text()
    assert "void" not in capsys.readouterr().out
