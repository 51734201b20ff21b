from fl_lightning.cli.flags import CommandParser, add_workers, number_of_workers, with_files


def test_a_configuration_file_may_say_who_computes_and_flags_override_it(tmp_path):
    parser = CommandParser()
    parser.add_argument("--config", action="append", default=[])
    add_workers(parser)
    path = tmp_path / "mine.yaml"
    path.write_text("workers: 3\nresources: {cpu: 0.5}\ntraining: {lr: 0.2}\n")
    options, settings = with_files(parser, ["--config", str(path), "--seed", "1"])
    assert (number_of_workers(options.workers), getattr(options, "resources.cpu")) == (3, 0.5)
    assert settings == {"training.lr": 0.2, "seed": "1"}
    options, _ = with_files(parser, ["--config", str(path), "--workers", "auto"])
    assert number_of_workers(options.workers) == "auto"
    assert number_of_workers(with_files(parser, [])[0].workers) == 1
