"""Readers of measured tables, on tiny made-up ones: shapes, devices, and every bad file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from perfopt.cost_model import aiconfigurator
from perfopt.cost_model.model_tables import ALL_READERS, step_of
from perfopt.cost_model.tables import Skipped, Table, TableError, read_file, reader_of
from perfopt.cost_model.validation import Score, harness, predicted, scores, size_class

GEMM = "m,n,k,latency_ms\n1,32,32,0.0026\n4096,4096,4096,0.18\n"
ATTENTION = (
    "kernel_source,batch_size,isl,num_heads,num_key_value_heads,head_dim,window_size,latency_ms\n"
    "fa3,2,2048,32,0,128,0,0.2\nfa3,2,2048,32,4,128,128,0.1\n"
)
NCCL = (
    "system,device,nccl,op_name,nccl_dtype,num_gpus,message_size_elems_or_bytes,latency_ms\n"
    "h100_sxm,NVIDIA H100,2.27,all_reduce,half,8,1024,0.02\n"
    "h100_sxm,NVIDIA H100,2.27,alltoall,int8,4,2048,0.01\n"
    "potato,Potato,2.27,alltoall,int8,4,2048,0.01\n"
)
XLA = (
    "device,dtypes,b,m,n,k,measured_flops_per_s,derived_us\n"
    "gfx942,bf16xbf16->bf16,1,256,512,256,1e13,6.7\n"
    "gfx942,f8e4m3fnuzxf8e5m2fnuz->f8e4m3fnuz,2,256,512,256,1e13,13.4\n"
    "gfx942,f32xf32->f32,1,256,512,256,1e15,0.067\n"
    "sm_90,f32xf32->f32,1,256,512,256,1e13,6.7\n"
    "sm_90,nonsense,1,256,512,256,1e13,6.7\n"
)
ROWS = (
    "OPName,Latency,Device,B,H\nadd,0.46,NVIDIA A100-PCIE-40GB,32768,1600\n"
    "gelu,0.46,NVIDIA A100-PCIE-40GB,32768,1600\nadd,1.2,Tesla K80,32768,1600\n"
)
LINEAR = "OPName,Latency,Device,B,M,N,K\nlinear,0.78,Tesla V100-SXM2-16GB,1,1024,2560,2560\n"


def read(tmp_path: Path, name: str, text: str) -> tuple[list[Table], list[Skipped]]:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    reader = reader_of(name, ALL_READERS)
    assert reader is not None
    skipped: list[Skipped] = []
    return read_file(path, name, reader, skipped), skipped


def test_gemm(tmp_path: Path) -> None:
    (table,), skipped = read(tmp_path, "aiconfigurator/gemm_bf16_h200_sxm.csv", GEMM)
    assert (table.source, table.family, skipped) == ("aiconfigurator", "gemm", [])
    assert table.device.name == "H200-SXM-141GB"
    assert table.seconds.tolist() == pytest.approx([2.6e-6, 1.8e-4])
    assert predicted(table).shape == (2,)
    (block,), _ = read(tmp_path, "aiconfigurator/gemm_fp8_block_gb200.csv", GEMM)
    assert (block.device.name, block.family) == ("GB200", "gemm_float8")


def test_attention(tmp_path: Path) -> None:
    name = "aiconfigurator/context_attention_bf16_l40s.csv"
    (table,), _ = read(tmp_path, name, ATTENTION)
    assert table.columns["kv_heads"].tolist() == [32, 4]
    whole, window = predicted(table)
    assert window < whole
    (plain,), _ = read(tmp_path, name, ATTENTION.replace(",window_size", "").replace(
        ",128,0,", ",128,").replace(",128,128,", ",128,"))  # fmt: skip
    assert plain.columns["window"].tolist() == [0, 0]


def test_collectives_count_elements(tmp_path: Path) -> None:
    found, skipped = read(tmp_path, "aiconfigurator/nccl_collectives.csv", NCCL)
    assert {t.family: t.columns["bytes"].tolist() for t in found} == {
        "collective/all_reduce": [2048.0], "collective/alltoall": [2048.0],
    }  # fmt: skip
    assert all(np.isfinite(predicted(table)).all() for table in found)
    (left,) = skipped
    assert left.rows == 1 and "'potato'" in left.reason


def test_collectives_that_links_do_not_join_are_left_out(tmp_path: Path) -> None:
    rows = NCCL.replace("half,8", "half,512")
    found, _ = read(tmp_path, "aiconfigurator/nccl_collectives.csv", rows)
    assert [s.family for s in scores(found) if s.size_class == "all"] == [
        "collective", "collective/alltoall",
    ]  # fmt: skip


def test_xla_dtypes(tmp_path: Path) -> None:
    found, skipped = read(tmp_path, "xla/default_matmul_perf_table.csv", XLA)
    assert [(t.device.name, t.family, t.values["result_bytes"]) for t in found] == [
        ("MI300X", "gemm", 2.0), ("MI300X", "gemm_float16", 1.0),
        ("H100-SXM5-80GB", "gemm_tf32", 4.0),
    ]  # fmt: skip
    assert found[0].seconds.tolist() == [2 * 256 * 512 * 256 / 1e13]
    reasons = " ".join(each.reason for each in skipped)
    assert "faster than the device can be" in reasons and "'nonsense'" in reasons
    assert harness("xla", "NVIDIA")["call_seconds"] > harness("xla", "AMD")["call_seconds"] == 0
    assert harness("aiconfigurator/vllm") == harness("aiconfigurator")
    assert harness("unheard of") == {"call_seconds": 0.0}


def test_neusight_kernels(tmp_path: Path) -> None:
    found, skipped = read(tmp_path, "neusight/elem.csv", ROWS)
    assert [t.family for t in found] == ["elementwise"] and skipped[0].rows == 1
    added, gelu = predicted(found[0])
    assert added > gelu  # three tensors, not two
    for name, family in (("ln", "layer_norm"), ("softmax", "softmax")):
        (table,), _ = (
            read(tmp_path, f"neusight/{name}.csv", ROWS.replace("Tesla K80", "Tesla T4"))[0][:1],
            None,
        )
        assert table.family == family and (predicted(table) > 0).all()
    (table,), _ = read(tmp_path, "neusight/linear.csv", LINEAR)
    assert 0.5 < predicted(table)[0] / 1.2e-3 < 2  # N is reduced over: 13.4 GFLOP
    (table,), _ = read(tmp_path, "neusight/bmm.csv", LINEAR.replace("linear,", "bmm,"))
    assert table.family == "bmm" and predicted(table).shape == (1,)


VIDUR = ("emb", "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj",
         "post_attention_layernorm", "mlp_up_proj", "mlp_act", "mlp_down_proj", "add")  # fmt: skip


def test_vidur(tmp_path: Path) -> None:
    header = [f"time_stats.{op}.median" for op in VIDUR]
    sizes = "n_head,n_kv_head,n_embd,n_expanded_embd,vocab_size,num_tokens"
    text = f"{','.join(header)},{sizes},num_tensor_parallel_workers\n"
    row = ",".join(["0.1"] * 9) + ",,32,32,4096,11008,32768,512,2\n"
    found, skipped = read(tmp_path, "vidur/compute/a100_Llama_mlp.csv", text + row)
    assert not skipped and [t.family for t in found] == list(VIDUR)
    assert [len(t.seconds) for t in found] == [1] * 9 + [0]
    assert all((predicted(t) > 0).all() for t in found)
    network = (
        "time_stats.all_reduce.median,num_workers,size,devices_per_node\n0.05,8,4096,8\n"
        "0.05,16,4096,8\n"
    )
    (table,), _ = read(tmp_path, "vidur/network/a100_dgx_all_reduce.csv", network)
    assert table.seconds.tolist() == [5e-5]


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("aiconfigurator/gemm_bf16_potato.csv", GEMM, "unknown device 'potato'"),
        ("aiconfigurator/gemm_bf12_h100.csv", GEMM, "is of dtype 'bf12'; known: bf16"),
        ("aiconfigurator/gemm_.csv", GEMM, "does not name a dtype and a system"),
        ("aiconfigurator/gemm_bf16_h100.csv", "", "holds no rows"),
        ("aiconfigurator/gemm_bf16_h100.csv", "m,n,k\n1,2,3\n", "has no column 'latency_ms'"),
        ("aiconfigurator/gemm_bf16_h100.csv", "m,n,k,latency_ms\n1,x,3,1\n", "in column 'n'"),
        ("aiconfigurator/gemm_bf16_h100.csv", "m,n,k,latency_ms\n1,2\n", "in column 'k'"),
        ("aiconfigurator/gemm_bf16_h100.csv", "\0\n\0\n", "column 'm'"),
        ("aiconfigurator/nccl_collectives.csv", "a,b\n1,2\n", "has no column 'system'"),
        ("aiconfigurator/nccl_collectives.csv", NCCL.replace("half", "hex"), "is of dtype 'hex'"),
        ("xla/default_matmul_perf_table.csv", GEMM, "has no column 'device'"),
        ("neusight/elem.csv", "Device,B\nTesla T4,1\n", "has no column 'H'"),
        ("neusight/e2e_measured.csv", "device,model\nTesla T4,b\n", "needs dl_configs/b.json"),
        ("neusight/fx_nodes_h100.csv", "op\nx\n", "does not name a device, a model and a mode"),
        ("neusight/fx_nodes_h100_b_inf_1.csv", "op\nx\n", "has no column 'fw_latency'"),
        ("vidur/compute/a100_x_mlp.csv", "n_head\n1\n", "has no column 'n_kv_head'"),
        ("vidur/network/a100_all_reduce.csv", "num_workers\n1\n", "holds no rows of one node"),
        ("timm/benchmark-infer-amp-nchw-potato.csv", "model\nx\n", "names no known device"),
        ("timm/benchmark-infer-amp-rtx3090.csv", "model\nx\n", "has no column 'infer_img_size'"),
        ("llm-foundry/mpt_training_throughput.csv", "GPU\na100_80gb\n", "has no column 'Model'"),
        ("liger/all_benchmark_data.csv", "a\n1\n", "has no column 'gpu_name'"),
    ],
)  # fmt: skip
def test_bad_files_are_named(tmp_path: Path, name: str, text: str, reason: str) -> None:
    found, skipped = read(tmp_path, name, text)
    assert not found and len(skipped) == 1
    assert skipped[0].file == name and reason in skipped[0].reason


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "gemm_bf16_h100.csv"
    path.write_bytes(b"\xff\xfe\x00")
    skipped: list[Skipped] = []
    reader = ALL_READERS["aiconfigurator/gemm_*.csv"]
    assert read_file(path, "x", reader, skipped) == []
    assert "cannot be read" in skipped[0].reason


def test_unknown_kinds_have_no_reader() -> None:
    assert reader_of("elsewhere/gemm_bf16_h100.csv", ALL_READERS) is None
    assert reader_of("aiconfigurator/moe_bf16_h100.csv", ALL_READERS) is None


NODES = """\
op,target,input_shapes,input_contiguous,fw_latency,bw_latency,acc_latency,output_shape,dtype,Name
placeholder,x,[],[],0.0,0.0,0.0,"(4, 8)",torch.int64,x
call_method,size,"[[4, 8]]",[True],0.007,0.0,0.0,"(1,)",,size
call_module,h.wte,"[[4, 8]]",[True],0.04,0.2,0.1,"(4, 8, 64)",torch.float32,wte
call_module,h.ln_1,"[[4, 8, 64]]",[True],0.03,0.06,0.01,"(4, 8, 64)",torch.float32,ln
call_module,h.drop,"[[4, 8, 64]]",[True],0.03,0.06,0.0,"(4, 8, 64)",torch.float32,drop
call_module,h.fc,"[[4, 8, 64]]",[True],0.03,0.06,0.0,"(4, 8, 256)",torch.float32,fc
call_method,view,"[[4, 8, 256], [1]]",[True],0.008,0.0,0.0,"(32, 256)",torch.float32,view
call_function,<built-in method matmul of type object>,"[[2, 8, 4], [2, 4, 8]]","[True, False]",\
0.02,0.03,0.0,"(2, 8, 8)",torch.float32,matmul
call_function,<function softmax at 0x2>,"[[2, 8, 8]]",[True],0.02,0.03,0.0,"(2, 8, 8)",\
torch.float32,softmax
call_function,<built-in function mul>,"[[2, 8], [2, 8]]","[True, True]",0.02,0.03,0.0,"(2, 8)",\
torch.float32,mul
call_function,<built-in function frobnicate>,"[[2, 8]]",[True],0.02,0.0,0.0,"(2, 8)",torch.float32,f
output,output,"[[2, 8]]",[True],0.0,0.0,0.0,"(2, 8)",torch.float32,output
"""


def test_nodes(tmp_path: Path) -> None:
    name = "neusight/fx_nodes_h100_gpt2_train_8_4.csv"
    found, skipped = read(tmp_path, name, NODES)
    ahead, behind = found
    assert [ahead.family, behind.family] == ["node/forward", "node/backward"]
    kinds = [step.kind for step in ahead.columns["step"]]
    assert kinds == ["host", "pick", "norm", "pointwise", "product", "view", "product", "softmax",
                     "pointwise"]  # fmt: skip
    assert ahead.columns["step"][6].copied == 64 and ahead.columns["step"][8].name == "mul2"
    assert len(behind.seconds) == 7 and (predicted(behind) > 0).all()
    assert skipped == [Skipped(name, "nodes that are not priced", 1)]
    (quiet, _), _ = read(tmp_path, name.replace("train", "inf"), NODES)
    assert quiet.columns["step"][3].kind == "host"  # dropout
    bad = NODES.replace('"(2, 8, 8)"', '"(2, 8"')
    assert "at node 'matmul'" in read(tmp_path, name, bad)[1][0].reason
    row = {"op": "call_function", "target": "<built-in method addmm of type>", "dtype": "x",
           "input_shapes": "[[5], [3, 4], [4, 5]]", "input_contiguous": "",
           "output_shape": "(3, 5)"}  # fmt: skip
    found_step = step_of(row, training=False)
    assert found_step is not None and found_step[0].sizes == (1.0, 3.0, 5.0, 4.0)


GPT = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 100}
BERT = {"model_type": "bert", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
        "intermediate_size": 128, "vocab_size": 100}  # fmt: skip
OPT = {**BERT, "model_type": "opt", "ffn_dim": 128}
SWITCH = {"model_type": "switch_transformers", "d_model": 64, "num_heads": 4, "d_ff": 128,
          "d_kv": 16, "num_layers": 2, "num_decoder_layers": 2, "num_experts": 2,
          "expert_capacity": 4, "vocab_size": 100}  # fmt: skip
RUNS = """\
device,model,mode,seqlen,batch,option,e2e_latency_ms,fw_latency_ms,bw_latency_ms
NVIDIA_A100-SXM4-40GB,gpt,inf,64,2,,1.0,1.0,0
NVIDIA_A100-SXM4-40GB,gpt,inf,64,2,fusion,1.0,1.0,0
NVIDIA_A100-SXM4-40GB,gpt,train,64,4,,1.0,1.0,0
NVIDIA_A100-SXM4-40GB,gpt,train,64,4,dp4,1.0,1.0,0
NVIDIA_A100-SXM4-40GB,gpt,train,64,4,tp4,1.0,1.0,0
NVIDIA_A100-SXM4-40GB,gpt,train,64,4,pp4_2,1.0,1.0,0
NVIDIA_A100-SXM4-40GB,bert,inf,64,2,,1.0,1.0,0
NVIDIA_A100-SXM4-40GB,opt,train,64,2,,1.0,1.0,0
NVIDIA_A100-SXM4-40GB,switch,inf,64,2,,1.0,1.0,0
NVIDIA_A100-SXM4-40GB,gpt,inf,64,2,wild,1.0,1.0,0
"""


def test_runs(tmp_path: Path) -> None:
    folder = tmp_path / "neusight" / "dl_configs"
    folder.mkdir(parents=True)
    for name, config in {"gpt": GPT, "bert": BERT, "opt": OPT, "switch": SWITCH}.items():
        (folder / f"{name}.json").write_text(json.dumps(config), encoding="utf-8")
    found, skipped = read(tmp_path, "neusight/e2e_measured.csv", RUNS)
    assert {t.family: len(t.seconds) for t in found} == {
        "model": 5, "model_fused": 1, "model_parallel": 3,
    }  # fmt: skip
    guesses = {table.family: predicted(table) for table in found}
    assert guesses["model_fused"][0] < guesses["model"][0] < guesses["model"][1]
    assert skipped[0].reason == "option 'wild' is not priced"
    for config, reason in (
        ("[]", "holds no object"), ('{"model_type": "rwkv"}', "'rwkv' is not known"),
        ('{"model_type": "gpt2"}', "'n_embd'"), ("{}", "'model_type'"), ("{", "needs"),
    ):  # fmt: skip
        (folder / "gpt.json").write_text(config, encoding="utf-8")
        assert reason in read(tmp_path, "neusight/e2e_measured.csv", RUNS)[1][0].reason


def test_suites(tmp_path: Path) -> None:
    head = (
        "model,infer_img_size,infer_samples_per_sec,infer_step_time,infer_batch_size,param_count,"
    )
    timm = head + "infer_gmacs,infer_macts\nvit,224,1000,256,256,22,4.6,11.9\nodd,224,1,1,1,1,,\n"
    name = "timm/benchmark-infer-amp-nchw-pt240-cu124-rtx5090-dynamo.csv"
    (table,), skipped = read(tmp_path, name, timm)
    assert (table.device.name, table.family) == ("RTX-5090", "model_compiled/nchw")
    assert table.seconds.tolist() == [0.256] and skipped[0].rows == 1
    train = "model,train_samples_per_sec,train_step_time,train_batch_size,train_img_size\n"
    (table,), _ = read(
        tmp_path, "timm/benchmark-train-amp-nhwc-rtx3090.csv", train + "vit,300,1,128,224\n"
    )
    assert table.family == "model_train/nhwc" and predicted(table)[0] > 0
    (table,), _ = read(tmp_path, "timm/benchmark-infer-fp32-nchw-cpu-i9_10940x.csv", timm)
    assert table.device.name == "i9-10940X" and table.values["mode"] == "cpu"
    mpt = (
        "section,Model,SeqLen (T),# GPUs,GPU,MicroBatchSize,Throughput (T/s/GPU),Precision,"
        "Activation Checkpointing,Activation CPUOffload\n"
        "with 1600 Gbps,7b,2048,16,h100_80gb,4,9000,amp_bf16,True,False\n"
        "with 1600 Gbps,9b,2048,16,h100_80gb,4,9000,amp_bf16,True,False\n"
    )
    (table,), skipped = read(tmp_path, "llm-foundry/mpt_training_throughput.csv", mpt)
    assert table.columns["nic"].tolist() == [25e9] and skipped[0].rows == 1
    assert 0.3 < predicted(table)[0] / table.seconds[0] < 3


LIGER = (
    "kernel_name,kernel_provider,kernel_operation_mode,metric_name,x_value,y_value_50,"
    "extra_benchmark_config_str,gpu_name\n"
    'kl_div,liger,forward,speed,4096,0.3064,"{""B"": 8, ""T"": 2048}",NVIDIA H100 PCIe\n'
    'kl_div,torch,forward,speed,4096,1.33,"{""B"": 8, ""T"": 2048}",NVIDIA H100 PCIe\n'
    'kl_div,liger,forward,memory,4096,1536,"{""B"": 8, ""T"": 2048}",NVIDIA H100 PCIe\n'
    'fused_moe,liger,forward,speed,4096,1.33,"{""B"": 8, ""T"": 2048}",NVIDIA H100 PCIe\n'
)


def test_liger(tmp_path: Path) -> None:
    name = "liger/all_benchmark_data.csv"
    found, skipped = read(tmp_path, name, LIGER)
    times = {t.family: predicted(t)[0] for t in found if t.kind == "stream"}
    assert times["fused_op"] == pytest.approx(3.06e-4, rel=0.2)
    assert times["eager_op"] == pytest.approx(1.33e-3, rel=0.2)
    assert any(each.rows == 1 for each in skipped)
    assert "'B'" in read(tmp_path, name, LIGER.replace('""B""', '""Q""'))[1][0].reason


def test_scores(tmp_path: Path) -> None:
    (table,), _ = read(tmp_path, "aiconfigurator/gemm_bf16_h100_sxm.csv", GEMM)
    every, tiny, medium = scores([table])
    assert (every.size_class, every.rows) == ("all", 2)
    assert (tiny.size_class, medium.size_class) == ("tiny", "medium")
    assert every.mape == pytest.approx((tiny.mape + medium.mape) / 2, abs=0.01)
    assert isinstance(every, Score) and every.median_ape == pytest.approx(every.mape)
    assert [size_class(s) for s in (1e-6, 1e-5, 1e-4, 1)] == ["tiny", "small", "medium", "large"]


def test_package_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiconfigurator, "PACKAGE", "no_such_package_at_all")
    with pytest.raises(TableError, match="pip install aiconfigurator-core"):
        aiconfigurator.package_tables([])
    package = tmp_path / "made_up_tables"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(aiconfigurator, "PACKAGE", "made_up_tables")
    with pytest.raises(TableError, match="has no measurements"):
        aiconfigurator.package_tables([])
    columns = _package_files(package / "systems" / "data")
    parquet = ModuleType("pyarrow.parquet")
    parquet.read_table = lambda path: _Arrow(columns[path.stem])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyarrow", ModuleType("pyarrow"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    skipped: list[Skipped] = []
    found = aiconfigurator.package_tables(skipped)
    assert sorted({(t.source, t.family) for t in found}) == [
        ("aiconfigurator/nccl", "collective/all_reduce"), ("aiconfigurator/vllm", "attention"),
        ("aiconfigurator/vllm", "gemm"), ("aiconfigurator/vllm", "gemm_float8_block"),
    ]  # fmt: skip
    assert all((predicted(t) > 0).all() for t in found)
    assert {each.file for each in skipped} >= {
        "abacus",
        "h100_sxm/gemm/vllm/0.10.0/gemm_perf.parquet",
    }


class _Arrow:
    """As much of a pyarrow table as is used."""

    def __init__(self, columns: dict[str, list[object]]) -> None:
        self.columns = {name: np.array(values) for name, values in columns.items()}
        self.schema = type("Schema", (), {"names": list(columns)})

    def __getitem__(self, name: str) -> object:
        values = self.columns[name]
        return type("Column", (), {"to_numpy": lambda self: values})()


def _package_files(data: Path) -> dict[str, dict[str, list[object]]]:
    for name in (
        "h100_sxm/gemm/vllm/0.9.0/gemm_perf", "h100_sxm/gemm/vllm/0.10.0/gemm_perf",
        "h100_sxm/attention/vllm/0.10.0/context_attention_perf",
        "h100_sxm/comm/nccl/2.27.3/nccl_perf", "abacus/gemm/vllm/0.9.0/gemm_perf",
    ):  # fmt: skip
        path = data / f"{name}.parquet"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"")
    size: list[object] = [64, 64, 64]
    return {
        "gemm_perf": {
            "gemm_dtype": ["bfloat16", "fp8_block", "int4_wo"], "m": size, "n": size, "k": size,
            "latency": [0.1, 0.1, 0.1],
        },
        "context_attention_perf": {
            "attn_dtype": ["bfloat16", "fp8"], "kv_cache_dtype": ["bfloat16", "fp8"],
            "step": [0, 0],
            "batch_size": [1, 1], "isl": [128, 128], "num_heads": [8, 8],
            "num_key_value_heads": [0, 8], "head_dim": [128, 128], "latency": [0.1, 0.1],
        },
        "nccl_perf": {
            "nccl_dtype": ["half", "odd"], "op_name": ["all_reduce", "all_reduce"],
            "message_size": [1024, 1024], "num_gpus": [8, 8], "latency": [0.1, 0.1],
        },
    }  # fmt: skip
