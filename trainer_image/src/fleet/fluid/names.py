"""The names in Paddle 1.8's ``fluid``, and their replacements in PyTorch or this package.

Modules of `fleet.fluid` use `missing` to report names that they do not have. From `EXAMPLES`, ``make docs``
generates the table in docs/paddle.md of the names that Paddle's examples use.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, Final, NoReturn

from fleet.errors import meant

__all__ = ["EXAMPLES", "here", "instead", "missing"]

# Each line has a replacement, a colon and names. After a replacement that ends with a dot, add the name.
# "-" means that there is no replacement.
_LAYERS: Final = """
torch.: abs acos addcmul addmm allclose arange argmax argmin argsort asin atan bmm ceil clamp clip concat cos
torch.: cross cumsum diag diag_embed dist dot erf exp eye flatten flip floor full full_like gather
torch.: index_select isfinite kron linspace log log1p logical_and logical_not logical_or logical_xor logsumexp
torch.: matmul meshgrid mul nonzero ones ones_like pow randint randn randperm reciprocal reshape roll round
torch.: rsqrt scatter sigmoid sign sin split sqrt square squeeze stack t tanh topk trace tril triu unique
torch.: unsqueeze where zeros zeros_like
torch.nn.functional.: batch_norm conv2d conv3d cross_entropy dropout elu embedding gelu group_norm
torch.nn.functional.: instance_norm interpolate layer_norm leaky_relu log_softmax mish mse_loss one_hot pad
torch.nn.functional.: pixel_shuffle prelu relu relu6 selu softmax softplus softshrink softsign unfold
torch.nn.functional.linear: fc
torch.nn.functional.conv_transpose2d: conv2d_transpose
torch.nn.functional.conv_transpose3d: conv3d_transpose
torch.nn.functional.adaptive_avg_pool2d: adaptive_pool2d
torch.nn.functional.adaptive_avg_pool3d: adaptive_pool3d
torch.nn.functional.max_pool2d or avg_pool2d: pool2d
torch.nn.functional.max_pool3d or avg_pool3d: pool3d
torch.nn.functional.affine_grid: affine_grid
torch.nn.functional.grid_sample: grid_sampler
torch.nn.functional.bilinear: bilinear_tensor_product
torch.nn.functional.hardtanh: brelu
torch.nn.functional.hardshrink: hard_shrink
torch.nn.functional.hardsigmoid: hard_sigmoid
torch.nn.functional.hardswish: hard_swish
torch.nn.functional.silu: swish
torch.nn.functional.tanhshrink: tanh_shrink
torch.nn.functional.threshold: thresholded_relu
torch.nn.functional.logsigmoid: logsigmoid
torch.nn.functional.huber_loss: huber_loss
torch.nn.functional.smooth_l1_loss: smooth_l1
torch.nn.functional.kl_div: kldiv_loss
torch.nn.functional.margin_ranking_loss: margin_rank_loss
torch.nn.functional.ctc_loss: warpctc
torch.nn.functional.mse_loss with reduction='none': square_error_cost
torch.nn.functional.binary_cross_entropy: log_loss
torch.nn.functional.binary_cross_entropy_with_logits: sigmoid_cross_entropy_with_logits
torch.nn.functional.cross_entropy: softmax_with_cross_entropy
torch.nn.functional.cross_entropy with label_smoothing: label_smooth
torch.nn.functional.cosine_similarity: cos_sim
torch.nn.functional.normalize: l2_normalize
torch.nn.functional.local_response_norm: lrn
torch.nn.functional.interpolate: image_resize image_resize_short resize_bilinear resize_nearest
torch.nn.functional.interpolate: resize_trilinear
torch.nn.functional.unfold: im2sequence
torch.nn.functional.pixel_unshuffle: space_to_depth
torch.nn.functional.channel_shuffle: shuffle_channel
torch.nn.functional.pad: pad2d pad_constant_like
torch.nn.utils.parametrizations.spectral_norm: spectral_norm
torch.nn.GRU: dynamic_gru
torch.nn.GRUCell: gru_unit GRUCell
torch.nn.LSTM: dynamic_lstm lstm
torch.nn.LSTM with proj_size: dynamic_lstmp
torch.nn.LSTMCell: lstm_unit LSTMCell
torch.nn.RNNCell: RNNCell
torch.nn.RNN, or a loop in the module: DynamicRNN rnn StaticRNN
torch.nn.EmbeddingBag: sequence_pool
torch.nn.utils.rnn.pad_sequence: sequence_pad
torch.nn.utils.rnn.unpad_sequence: sequence_unpad
torch.nn.Parameter: create_parameter
module.register_buffer: autoincreased_step_counter create_global_var
a loop in a PyTorch module, captured with fleet.Program.capture: While while_loop
Python's if in a PyTorch module, captured with fleet.Program.capture: case cond IfElse Switch switch_case
a Python list in a PyTorch module: array_length array_read array_write create_array tensor_array_to_tensor
a beam search over torch.topk in a PyTorch module: beam_search beam_search_decode BeamSearchDecoder
a beam search over torch.topk in a PyTorch module: gather_tree
a loop over decoding steps in a PyTorch module: BasicDecoder DecodeHelper Decoder dynamic_decode
a loop over decoding steps in a PyTorch module: GreedyEmbeddingHelper SampleEmbeddingHelper TrainingHelper
torch.distributions.: Categorical Normal Uniform
torch.distributions.MultivariateNormal: MultivariateNormalDiag
torch.normal: gaussian_random gaussian_random_batch_size_like
torch.rand: uniform_random uniform_random_batch_size_like
torch.multinomial: sampling_id
torch.clone: assign
tensor.to: cast
tensor.expand: expand expand_as
tensor.shape: rank shape size
tensor.numel() == 0: is_empty
torch.flip: reverse
tensor.unbind: unstack
tensor.permute: transpose
tensor[...]: crop crop_tensor gather_nd slice strided_slice
torch.add: elementwise_add increment sum sums
torch.sub: elementwise_sub
torch.mul: elementwise_mul scale
torch.div: elementwise_div
torch.floor_divide: elementwise_floordiv
torch.remainder: elementwise_mod
torch.pow: elementwise_pow
torch.maximum: elementwise_max
torch.minimum: elementwise_min
torch.eq: elementwise_equal equal
torch.ne: not_equal
torch.lt: less_than
torch.le: less_equal
torch.gt: greater_than
torch.ge: greater_equal
torch.all: reduce_all
torch.any: reduce_any
torch.amax: reduce_max
torch.amin: reduce_min
torch.mean: mean reduce_mean
torch.prod: reduce_prod
torch.sum: reduce_sum
torch.isinf(x).any(): has_inf
torch.isnan(x).any(): has_nan
torch.full: fill_constant fill_constant_batch_size_like
torch.empty: create_tensor
torch.index_add: scatter_nd scatter_nd_add
torch.take_along_dim: index_sample
torch.unique with return_counts: unique_with_counts
torch.arange: range
torch.renorm: clip_by_norm
torch.autograd.Function: py_func
print: Print
torchvision.ops.: roi_align roi_pool sigmoid_focal_loss
torchvision.ops: anchor_generator bipartite_match box_clip box_coder box_decoder_and_assign
torchvision.ops: collect_fpn_proposals deformable_conv deformable_roi_pooling density_prior_box
torchvision.ops: detection_output distribute_fpn_proposals generate_mask_labels generate_proposal_labels
torchvision.ops: generate_proposals iou_similarity locality_aware_nms multi_box_head multiclass_nms
torchvision.ops: polygon_box_transform prior_box prroi_pool psroi_pool retinanet_detection_output
torchvision.ops: retinanet_target_assign roi_perspective_transform rpn_target_assign ssd_loss target_assign
torchvision.ops: yolo_box yolov3_loss
torchvision.transforms.RandomCrop: random_crop
torch.optim.lr_scheduler.ExponentialLR: exponential_decay natural_exp_decay
torch.optim.lr_scheduler.LambdaLR: inverse_time_decay noam_decay
torch.optim.lr_scheduler.LinearLR: linear_lr_warmup
torch.optim.lr_scheduler.CosineAnnealingLR: cosine_decay
torch.optim.lr_scheduler.MultiStepLR: piecewise_decay
torch.optim.lr_scheduler.PolynomialLR: polynomial_decay
the step that the schedule is given: _decay_step_counter
fleet.metrics.: accuracy auc
the arguments of loss_fn: data
torch.utils.data.DataLoader: create_py_reader_by_data double_buffer py_reader read_file
fleet.load_persistables or torch.load: load
-: add_position_encoding affine_channel bpr_loss center_loss chunk_eval continuous_value_model crf_decoding
-: ctc_greedy_decoder data_norm dice_loss edit_distance filter_by_instag fsp_matrix
-: get_tensor_from_selected_rows hash hsigmoid inplace_abn linear_chain_crf lod_append lod_reset matrix_nms
-: maxout mean_iou merge_selected_rows multiplex nce npair_loss rank_loss reorder_lod_tensor_by_rank row_conv
-: sampled_softmax_with_cross_entropy sequence_concat sequence_conv sequence_enumerate sequence_expand
-: sequence_expand_as sequence_first_step sequence_last_step sequence_mask sequence_reshape sequence_reverse
-: sequence_scatter sequence_slice sequence_softmax shard_index similarity_focus soft_relu stanh
-: teacher_student_sigmoid_loss temporal_shift
"""
_REST: Final = {
    "": """
    PyTorch itself, as it runs step by step: disable_dygraph disable_imperative dygraph
    PyTorch itself, as it runs step by step: enable_dygraph enable_imperative in_dygraph_mode VarBase
    torch.optim.lr_scheduler: learning_rate_decay
    fluid.layers: nets
    torch.autocast for mixed precision, torch.profiler for memory: contrib
    fleet.metrics: average evaluator metrics
    torch.save and torch.load: load load_program_state save set_program_state
    torch.nn.utils.parametrizations.weight_norm: WeightNormParamAttr
    torch.cuda.is_available: is_compiled_with_cuda
    fluid.CPUPlace: cpu_places cuda_pinned_places CUDAPinnedPlace
    fluid.CUDAPlace, in one process for each device: cuda_places
    a Python list: LoDTensorArray
    torch.profiler: profiler
    torch.autograd.grad: gradients
    torch.device: device_guard
    torch.library: load_op_library
    fluid.layers.: embedding one_hot
    -: append_backward BuildStrategy Communicator CompiledProgram ComplexVariable DataFeedDesc
    -: DistMultiTrainer ExecutionStrategy get_flags global_scope install_check memory_optimize
    -: MultiTrainer name_scope ParallelExecutor PipelineTrainer release_memory require_version
    -: scope_guard set_flags Tensor TrainerDesc
    """,
    "optimizer": """
    torch.optim.: Adadelta Adagrad Adam Adamax RMSprop SGD
    torch.optim.Adamax: AdamaxOptimizer
    torch.optim.Adadelta: AdadeltaOptimizer
    strategy.power_sgd, which compresses gradients: DGCMomentumOptimizer
    torch.utils.checkpoint: RecomputeOptimizer
    torch.distributed.pipelining: PipelineOptimizer
    torch.optim.swa_utils.AveragedModel: ExponentialMovingAverage ModelAverage
    a torch.optim.Optimizer of the script, captured with fleet.Program.capture: DecayedAdagrad
    a torch.optim.Optimizer of the script, captured with fleet.Program.capture: DecayedAdagradOptimizer Dpsgd
    a torch.optim.Optimizer of the script, captured with fleet.Program.capture: DpsgdOptimizer Ftrl
    a torch.optim.Optimizer of the script, captured with fleet.Program.capture: FtrlOptimizer LambOptimizer
    a torch.optim.Optimizer of the script, captured with fleet.Program.capture: LarsMomentum
    a torch.optim.Optimizer of the script, captured with fleet.Program.capture: LarsMomentumOptimizer
    a torch.optim.Optimizer of the script, captured with fleet.Program.capture: LookaheadOptimizer
    torch.optim.RMSprop: RMSProp RMSPropOptimizer
    torch.optim.SGD with momentum: Momentum MomentumOptimizer
    torch.optim.SGD: SGDOptimizer
    torch.optim.Adagrad: AdagradOptimizer
    torch.optim.Adam: AdamOptimizer
    """,
    "initializer": """
    torch.nn.init.constant_: Constant ConstantInitializer
    torch.nn.init.uniform_: Uniform UniformInitializer
    torch.nn.init.normal_: Normal NormalInitializer
    torch.nn.init.trunc_normal_: TruncatedNormal TruncatedNormalInitializer
    torch.nn.init.xavier_uniform_: Xavier XavierInitializer
    torch.nn.init.kaiming_uniform_: MSRA MSRAInitializer
    torch.from_numpy: NumpyArrayInitializer
    -: Bilinear BilinearInitializer
    """,
    "regularizer": """
    weight_decay of torch.optim: L2Decay L2DecayRegularizer
    a term of the loss: L1Decay L1DecayRegularizer
    """,
    "clip": """
    fleet.ClipGradByValue: GradientClipByValue
    fluid.clip.GradientClipByValue, for the gradients of parameters: ErrorClipByValue
    fleet.ClipGradByNorm: GradientClipByNorm
    fleet.ClipGradByGlobalNorm: GradientClipByGlobalNorm
    grad_clip of fleet.Program.capture: set_gradient_clip
    """,
    "io": """
    fleet.save_persistables: save_params save_persistables save_vars
    fleet.load_persistables: is_persistable load_params load_persistables load_vars
    fleet.save_inference_model: save_inference_model
    safetensors.torch.load_file: load_inference_model
    torch.utils.data.DataLoader: DataLoader default_collate_fn PyReader
    torch.save: save
    torch.load: load load_program_state set_program_state
    module.named_parameters: get_program_parameter
    module.state_dict: get_program_persistable_vars
    fluid.io.buffered, with one process: multiprocess_reader
    """,
    "core": """
    torch.cuda.device_count: get_cuda_device_count
    fluid.CPUPlace or fluid.CUDAPlace: Place
    the attribute op_role of an operator, a fleet.fluid.OpRole: op_proto_and_checker_maker
    """,
    "contrib": """
    torch.cuda.max_memory_allocated: memory_usage
    torch.autocast: mixed_precision
    files = fleet.split_files(files): reader
    fluid.layers: decoder layers
    torch.ao.quantization: quantize slim
    """,
    "profiler": """
    torch.profiler.profile: cuda_profiler profiler reset_profiler start_profiler stop_profiler
    """,
    "paddle.dataset": """
    torchvision.datasets: cifar flowers mnist voc2012
    -: common conll05 image imdb imikolov movielens mq2007 sentiment wmt14 wmt16
    """,
    "paddle": """
    from fleet import fluid: fluid
    """,
}

_MODULES: Final = {"layers": _LAYERS, **_REST}
_BESIDE: Final = {
    "fluid.incubate.fleet.collective.fleet._origin_program": "fleet.collective.fleet.main_program",
    "fluid.incubate.fleet.base.role_maker": "fleet.role_maker",
    "fluid.incubate.fleet.collective.fleet": "fleet.collective.fleet",
    "fluid.incubate.fleet.collective": "fleet",
    "fluid.incubate.fleet.parameter_server.distribute_transpiler.fleet": "fleet.parameter_server.fleet",
    "fluid.transpiler.distribute_transpiler.distributed_strategy": "fleet",
    "fluid.transpiler.distribute_transpiler": "fleet",
}
"""The counterparts, outside `fleet.fluid`, of some of Paddle's modules and of one attribute."""
_EXAMPLES: Final = """
fluid: BuildStrategy BuildStrategy.ReduceStrategy.Reduce CompiledProgram CPUPlace CUDAPlace data DataFeeder
fluid: DatasetFactory default_main_program default_startup_program DistributeTranspiler
fluid: DistributeTranspilerConfig ExecutionStrategy Executor global_scope is_compiled_with_cuda LoDTensor
fluid: ParallelExecutor ParamAttr Program program_guard scope_guard
fluid.clip: GradientClipByGlobalNorm set_gradient_clip
fluid.compiler: CompiledProgram
fluid.contrib: memory_usage mixed_precision.decorate mixed_precision.decorator.decorate
fluid.contrib: reader.distributed_batch_reader
fluid.core: CPUPlace EOFException get_cuda_device_count op_proto_and_checker_maker.OpRole
fluid.core: op_proto_and_checker_maker.OpRole.Backward Place Scope VarDesc.VarType.FP16 VarDesc.VarType.FP32
fluid.executor: FetchHandler
fluid.framework: cuda_places name_scope Parameter Program program_guard
fluid.incubate: data_generator.MultiSlotDataGenerator
fluid.incubate.fleet.base.role_maker: PaddleCloudRoleMaker Role.SERVER Role.WORKER UserDefinedRoleMaker
fluid.incubate.fleet.collective: DistributedStrategy
fluid.incubate.fleet.collective.fleet: _origin_program distributed_optimizer init main_program worker_index
fluid.incubate.fleet.collective.fleet: worker_num
fluid.incubate.fleet.parameter_server.distribute_transpiler.fleet: distributed_optimizer init init_server
fluid.incubate.fleet.parameter_server.distribute_transpiler.fleet: init_worker is_first_worker is_server
fluid.incubate.fleet.parameter_server.distribute_transpiler.fleet: is_worker main_program run_server
fluid.incubate.fleet.parameter_server.distribute_transpiler.fleet: save_persistables split_files
fluid.incubate.fleet.parameter_server.distribute_transpiler.fleet: startup_program stop_worker worker_index
fluid.incubate.fleet.parameter_server.distribute_transpiler.fleet: worker_num
fluid.initializer: Constant Normal TruncatedNormal TruncatedNormalInitializer Uniform Xavier
fluid.io: DataLoader.from_generator is_persistable load_inference_model load_persistables load_vars
fluid.io: save_inference_model save_params save_persistables
fluid.layers: accuracy array_read array_write assign auc batch_norm beam_search beam_search_decode cast concat
fluid.layers: control_flow.Switch conv2d cos_sim cosine_decay create_parameter create_py_reader_by_data
fluid.layers: create_tensor cross_entropy data dropout elementwise_add elementwise_div elementwise_max
fluid.layers: elementwise_mul elementwise_sub embedding exponential_decay fc fill_constant
fluid.layers: fill_constant_batch_size_like gather increment is_empty l2_normalize label_smooth layer_norm
fluid.layers: learning_rate_scheduler._decay_step_counter learning_rate_scheduler.noam_decay
fluid.layers: learning_rate_scheduler.polynomial_decay less_than lod_reset log log_loss logical_and
fluid.layers: logical_not matmul mean one_hot ops.cos ops.floor piecewise_decay polynomial_decay pool2d
fluid.layers: py_reader read_file reduce_mean reduce_sum reshape scale sequence_pool sigmoid
fluid.layers: sigmoid_cross_entropy_with_logits slice softmax softmax_with_cross_entropy softsign square
fluid.layers: square_error_cost stack tensor.assign tensor.create_global_var topk transpose unstack While
fluid.optimizer: Adagrad Adam DGCMomentumOptimizer Momentum RMSProp SGD
fluid.param_attr: ParamAttr
fluid.profiler: start_profiler stop_profiler
fluid.regularizer: L1DecayRegularizer L2Decay L2DecayRegularizer
fluid.transpiler.distribute_transpiler: DistributeTranspilerConfig
fluid.transpiler.distribute_transpiler.distributed_strategy: StrategyFactory.create_async_strategy
fluid.unique_name: guard
paddle: batch dataset.uci_housing.train enable_static reader.shuffle reader.xmap_readers
"""


def _listed(text: str) -> Iterator[tuple[str, str]]:
    """Yield each name in a table with its replacement."""
    for line in text.split("\n"):
        before, _, names = line.strip().rpartition(": ")
        for name in names.split():
            yield name, before


EXAMPLES: Final = tuple(f"{module}.{name}" for name, module in _listed(_EXAMPLES))
"""The names that Paddle's documentation and example scripts use."""


@cache
def _ways(module: str) -> dict[str, str]:
    """Return the replacements for the names in a Paddle module; empty for names without a replacement."""
    return {
        name: "" if way == "-" else way + name if way.endswith(".") else way
        for name, way in _listed(_MODULES.get(module, ""))
    }


def instead(dotted: str) -> str:
    """Return the replacement for one of Paddle's names in PyTorch or this package.

    Parameters
    ----------
    dotted : str
        Such as ``fluid.layers.fc``.

    Returns
    -------
    str
        Empty if there is none.
    """
    for module, ours in _BESIDE.items():
        if dotted == module or dotted.startswith(f"{module}."):
            return ours + dotted.removeprefix(module)
    first, *path = dotted.split(".")
    if first != "fluid":
        path = ["paddle", *path]
    module = path[0] if path[0] in _MODULES else ""
    names = path[1:] if module else path
    return next((_ways(module)[name] for name in names if name in _ways(module)), "")


def here(dotted: str) -> bool:
    """Return whether one of Paddle's names exists in this package.

    Parameters
    ----------
    dotted : str
        Such as ``fluid.layers.fc``, ``paddle.batch`` or ``fleet.parameter_server.fleet.init``.
    """
    first, *path = dotted.split(".")
    found: Any = {"fluid": "fleet.fluid", "paddle": "fleet.fluid.paddle", "fleet": "fleet"}.get(first)
    if found is None or not path:
        return False
    found = import_module(found)
    for name in path:
        with suppress(ImportError):
            if isinstance(found, ModuleType):
                import_module(f"{found.__name__}.{name}")
        # Looked up on the class, because properties of a job's `fleet` raise errors before the job has begun.
        found = (
            getattr(found, name, None) if not isinstance(getattr(type(found), name, None), property) else name
        )
        if found is None:
            return False
    return True


def missing(module: str) -> Callable[[str], NoReturn]:
    """Return a module's ``__getattr__``, whose error suggests a replacement for the missing name.

    Parameters
    ----------
    module : str
        The part of the module's name after ``fleet.fluid.``; empty for `fleet.fluid` itself.

    Returns
    -------
    callable
        Raises an AttributeError, whose message gives the replacement if the name is Paddle's.
    """

    def refuse(name: str) -> NoReturn:
        full = f"fleet.fluid.{module}" if module else "fleet.fluid"
        ways = _ways(module)
        if name not in ways:
            problem = f"module {full!r} has no attribute {name!r}{meant(name, ways)}"
        else:
            original = full.removeprefix("fleet.").replace("fluid.paddle", "paddle")
            way = f"; use {ways[name]}" if ways[name] else ""
            problem = (
                f"{original}.{name} is not in fleet.fluid{way} (docs/paddle.md has a table of the names)"
            )
        raise AttributeError(problem, name=name, obj=None)

    return refuse
