from fl_lightning.cli import doctor


def test_a_machine_without_a_gpu_passes_and_says_so(out, capsys):
    assert doctor.main(["--runs", str(out), "--compute.device", "cpu"]) == 0
    said = capsys.readouterr().out
    for part in ("python ", "torch sees none", "repeated to the bit", "nothing is amiss", f"sqlite:///{out}"):
        assert part in said


def test_what_is_amiss_is_said_with_what_to_do(out, capsys, monkeypatch):
    (out / "mlflow.db").write_bytes(b"nonsense")
    monkeypatch.setattr(doctor, "LEAST_DISK", 1e18)
    assert doctor.main(["--runs", str(out), "--compute.device", "cuda:1"]) == 1
    said = capsys.readouterr().out
    assert "-> the next run sets it aside and makes a new one" in said
    assert "-> a sweep fills it" in said
    assert "-> compute.device is 'cuda:1', but torch sees no GPU here; use --compute.device cpu" in said
    assert said.rstrip().endswith("amiss: 3")


def test_what_a_device_dies_of_is_a_finding(out, capsys, monkeypatch):
    def fail(device):
        raise RuntimeError("CUDA error: no kernel image is available\nfor execution on the device")

    monkeypatch.setattr(doctor, "trained", fail)
    assert doctor.main(["--runs", str(out), "--compute.device", "cpu"]) == 1
    said = capsys.readouterr().out
    assert "RuntimeError: CUDA error: no kernel image is available for execution on the device\n" in said
    assert "-> update the device's driver and torch; until then use --compute.device cpu" in said
    assert "Ray        not asked; as torch counts, this machine: " in said
