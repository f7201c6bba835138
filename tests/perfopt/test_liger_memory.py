"""Peak memory of the programs of Liger's table, by counting their tensors."""

import json

import numpy as np
import pytest

from perfopt.cost_model.device import device_named
from perfopt.cost_model.suite_tables import SUITE_READERS
from perfopt.cost_model.tables import read_file
from perfopt.cost_model.validation import scores
from perfopt.liger_memory import PROGRAMS, peaks

NAME = "liger/all_benchmark_data.csv"
HEAD = (
    "kernel_name,kernel_provider,kernel_operation_mode,metric_name,metric_unit,x_name,x_value,"
    "y_value_50,extra_benchmark_config_str,gpu_name"
)


def table_of(tmp_path, kernel, provider, value, config, mib, gpu="NVIDIA A100-SXM4-80GB"):
    text = json.dumps(config).replace('"', '""')
    row = f'{kernel},{provider},full,memory,MB,x,{value},{mib},"{text}",{gpu}'
    path = tmp_path / "all_benchmark_data.csv"
    path.write_text(f"{HEAD}\n{row}\n")
    (table,) = read_file(path, NAME, SUITE_READERS[NAME], [])
    return table


# Tensors of the input's size that are alive at once, with all that is held between steps.
@pytest.mark.parametrize(
    ("kernel", "provider", "tensors"),
    [
        ("layer_norm", "huggingface", 5),  # x, its old and its new gradient, y, dy
        ("rms_norm", "torch", 5),
        ("kl_div", "torch", 7),
        ("jsd", "liger", 6),
        ("tvd", "torch", 8),
    ],
)
def test_tensors_of_row_programs(tmp_path, kernel, provider, tensors) -> None:
    config = {"M": 1024, "B": 2, "T": 512, "dtype": "torch.float32"}
    table = table_of(tmp_path, kernel, provider, 4096, config, 1)
    assert peaks(table)[0] / (1024 * 4096 * 4) == pytest.approx(tensors, rel=2e-3)


def test_every_program_runs(tmp_path) -> None:
    config = {
        "M": 64, "B": 2, "T": 32, "S": 32, "H": 64, "V": 512, "D": 16, "E": 4, "K": 2,
        "sweep_dim": "T", "intermediate_dim": 32, "hidden_size": 64, "num_heads": 4, "bias": True,
        "batch_size": 2, "num_q_heads": 4, "num_kv_heads": 2, "bsz": 2, "intermediate_size": 96,
        "dtype": "torch.bfloat16",
    }  # fmt: skip
    for kernel in PROGRAMS:
        provider = "huggingface" if kernel == "fused_add_rms_norm" else "liger"
        found = peaks(table_of(tmp_path, kernel, provider, 128, config, 1))
        assert np.isfinite(found).all(), kernel
        assert found[0] > 0, kernel


def test_later_devices_have_larger_workspaces(tmp_path) -> None:
    config = {"bsz": 1, "hidden_size": 64, "intermediate_size": 64, "dtype": "torch.bfloat16"}
    sizes = [
        peaks(table_of(tmp_path, "swiglu", "huggingface", 128, config, 1, gpu))[0]
        for gpu in ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3")
    ]
    assert sizes[1] - sizes[0] == 2 * ((32 << 20) - (8 << 20) - (128 << 10))
    assert device_named("NVIDIA H100 80GB HBM3").arch == "sm_90"


def test_scores_are_of_all_sizes_at_once_and_leave_out_the_unknown(tmp_path) -> None:
    known = table_of(tmp_path, "layer_norm", "huggingface", 1024, {"M": 4096}, 80.1)
    (score,) = scores([known], {"memory": peaks})
    assert (score.family, score.size_class, score.rows) == ("peak_memory", "all", 1)
    assert score.mape < 1
    unknown = table_of(tmp_path, "something_new", "liger", 1024, {"M": 4096}, 80.1)
    assert np.isnan(peaks(unknown)).all()
    assert scores([unknown], {"memory": peaks}) == []
