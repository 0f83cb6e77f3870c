"""The structs, constants and functions of include/dray/: made by scripts/declared.py, not by hand."""
import ctypes as c

CODE = "0 or a negative code, and the error as the last argument"


class Sized(c.Structure):
    """A struct that begins with its own size."""

    def __init__(self, **values):
        super().__init__(size=c.sizeof(type(self)), **values)


OK = 0
EINVALID = -1
ENOMEM = -2
ENOENT = -3
EEXIST = -4
ESYS = -5
EFORMAT = -6
EVERSION = -7
ECHECKSUM = -8
EDTYPE = -9
ESHAPE = -10
EHOLE = -11
EOVERLAP = -12
ETIMEDOUT = -13
EAGAIN = -14
ECLOSED = -15
EDEAD = -16
ESTALE = -17
EGONE = -18
EEND = -19
EFULL = -20
ETORN = -21
EPERM = -22
EBUSY = -23
EPROTO = -24
ECANCELED = -25
EUNSUPPORTED = -26
EINTERNAL = -27
ORIGIN_DRAY = 0
ORIGIN_ERRNO = 1
ORIGIN_CUDA = 2
ORIGIN_NCCL = 3
ORIGIN_UCX = 4
ORIGIN_WAIT = 5
LOG_ERROR = 0
LOG_WARN = 1
LOG_INFO = 2
LOG_DEBUG = 3
FENCE_NONE = 0
FENCE_CUDA_EVENT = 1
FENCE_CUDA_STREAM = 2
DTYPE_NONE = 0
F64 = 1
F32 = 2
BF16 = 3
F16 = 4
F8E4M3 = 5
F8E5M2 = 6
I64 = 7
I32 = 8
I16 = 9
I8 = 10
U64 = 11
U32 = 12
U16 = 13
U8 = 14
BOOL = 15
REGION_HOST = 1
REGION_SHARED = 2
REGION_PINNED = 3
REGION_CUDA = 4
REGION_FILE = 5
QUANT_NONE = 0
QUANT_BLOCK = 1
QUANT_TENSOR = 2
QUANT_DEEPGEMM = 3
QUANT_MXFP8 = 4
QUANT_MXFP4 = 5
QUANT_NVFP4 = 6
QUANT_INT4 = 7
QUANT_INT4_ZERO = 8
SCALE_F32 = 0
SCALE_UE8M0 = 1
MODEL_DENSE_WORDS = 8
MODEL_OWN = 32
MODEL_KINDS = 3
REPLICATE = 0
SHARD = 1
STRIDED_SHARD = 2
PARTIAL = 3
MEGATRON_GROUPED = 0
MEGATRON_PACKED = 1
MEGATRON_SEQUENTIAL = 2
ENGINE_SGLANG = 0
ENGINE_VLLM = 1
DRAFT_SHARED = 0
DRAFT_COPIES = 1
DRAFT_NONE = 2
W13_GATE_UP = 0
W13_UP_GATE = 1
PART_ATTENTION = 1
PART_DENSE = 2
PART_SHARED = 4
PART_EXPERTS = 8
PART_ROUTER = 16
PART_LINEAR = 31
CUDA_FORM_NONE = 0
CUDA_FORM_VMM = 1
CUDA_FORM_IPC = 2
CAST_NONE = 1
CAST_FLOAT = 2
CAST_QUANT = 4
CAST_DEFAULT = 6
LINK_PROCESS = 0
LINK_DEVICE = 1
LINK_HOST = 2
LINK_NETWORK = 3
LINK_FILE = 4
LINK_COUNT = 5
TRANSFORM_QUANTISE = 1
TRANSFORM_DEQUANTISE = 2
TRANSFORM_MOST = 3
MODE_AUTO = 0
MODE_TENSOR = 1
MODE_DISTRIBUTED = 2
MODE_DISK = 3
STRATEGY_DIRECT = 0
STRATEGY_BUCKET = 1
STRATEGY_PARAMETER = 2
SOURCE_PUBLISHERS = 0
SOURCE_PEERS = 1
SOURCE_DISK = 2
SOURCE_STAGING = 3
GROUP_EMPTY = 0
GROUP_WHOLE = 1
GROUP_TORN = 2
ENGINE_JOINED = 1
ENGINE_LEFT = 2
ENGINE_UPDATED = 3
ENGINE_TORN = 4
GPU_LINK_NONE = 0
GPU_LINK_SAME = 1
GPU_LINK_PCIE = 2
GPU_LINK_NVLINK = 3
SPAN_BUSY = 0
SPAN_WAIT = 1
SPAN_TRANSFER = 2
CAUSE_UNKNOWN = 0
CAUSE_SAMPLES = 1
CAUSE_WEIGHTS = 2
CAUSE_READERS = 3
CAUSE_RANKS = 4
CAUSE_ADMISSION = 5
CAUSE_CAPACITY = 6
CAUSE_TOOL = 7
CAUSE_RESTART = 8
CAUSE_CONTROLLER = 9
CAUSE_LEASE = 10
ON_LOSS_DEFAULT = 0
ON_LOSS_REFILL = 1
ON_LOSS_SHRINK_GROUP = 2
ON_LOSS_DROP_GROUP = 3
DURABILITY_DEFAULT = 0
DURABILITY_NONE = 1
DURABILITY_CHECKPOINT = 2
DURABILITY_JOURNAL = 3
BACKEND_DEFAULT = 0
BACKEND_BUILTIN = 1
BACKEND_REDIS = 2
CONTENT_TENSOR = 0
CONTENT_STRING = 1
CONTENT_BYTES = 2
CONTENT_OBJECT = 3
LOSS_FAILED = 0
LOSS_STALE = 1
LOSS_ROLLED_BACK = 2
LOSS_BYTES = 3
POLICY_FIFO = 0
POLICY_ORDERED = 1
POLICY_GROUP = 2
POLICY_OLDEST_VERSION = 3
POLICY_PRIORITY = 4
POLICY_TOKEN_BALANCED = 5
POLICY_LOCKSTEP = 6
FRESH_ANY = 0
FRESH_DROP = 1
FRESH_LEFT = 2
VERSION_MAJOR = 0
VERSION_MINOR = 1
VERSION_PATCH = 0
ERROR_MESSAGE_MAX = 496
WAIT_DEFAULT = -1
LEASE_NAMES = 64
MAX_DIMS = 4


LogFn = c.CFUNCTYPE(None, c.c_void_p, c.c_int, c.c_char_p)


InterruptFn = c.CFUNCTYPE(c.c_int)


ProveFn = c.CFUNCTYPE(None, c.c_void_p, c.c_uint32, c.c_uint64)


class LoadTensor(c.Structure):
    _fields_ = [("name", c.c_char_p), ("dtype", c.c_int32), ("ndim", c.c_uint32),
                ("shape", c.c_int64 * 4), ("first_row", c.c_int64), ("rows", c.c_int64),
                ("start", c.c_uint64), ("end", c.c_uint64), ("numel", c.c_uint64)]


class LoadBucket(Sized):
    _fields_ = [("size", c.c_size_t), ("version", c.c_uint64), ("data", c.c_void_p),
                ("bytes", c.c_uint64), ("tensors", c.POINTER(LoadTensor)), ("count", c.c_uint32),
                ("index", c.c_uint32), ("buckets", c.c_uint32)]


class Error(c.Structure):
    _fields_ = [("code", c.c_int32), ("origin", c.c_int32), ("raw", c.c_int64),
                ("message", c.c_char * 496)]


LoadFn = c.CFUNCTYPE(c.c_int, c.c_void_p, c.POINTER(LoadBucket), c.POINTER(Error))


class EngineInfo(Sized):
    _fields_ = [("size", c.c_size_t), ("model", c.c_char_p), ("group", c.c_char_p),
                ("version", c.c_uint64), ("incarnation", c.c_uint64), ("epoch", c.c_uint64),
                ("ranks", c.c_uint32), ("world", c.c_uint32), ("state", c.c_int32),
                ("serving", c.c_int32), ("leaving", c.c_int32)]


EnginesFn = c.CFUNCTYPE(None, c.c_void_p, c.c_int, c.POINTER(EngineInfo))


class Fence(Sized):
    _fields_ = [("size", c.c_size_t), ("kind", c.c_int32), ("event", c.c_void_p)]


class Options(Sized):
    _fields_ = [("size", c.c_size_t), ("address", c.c_char_p), ("name", c.c_char_p),
                ("role", c.c_char_p), ("host", c.c_char_p), ("rank", c.c_uint32),
                ("timeout_ns", c.c_int64), ("trusted_networks", c.c_char_p),
                ("transport", c.c_char_p)]


class RegionInfo(c.Structure):
    _fields_ = [("kind", c.c_int32), ("bytes", c.c_uint64), ("name", c.c_char_p),
                ("device", c.c_uint8 * 16)]


class TensorInfo(c.Structure):
    _fields_ = [("name", c.c_char_p), ("dtype", c.c_int32), ("ndim", c.c_uint32),
                ("shape", c.c_int64 * 4), ("alias_of", c.c_int32)]


class Block(c.Structure):
    _fields_ = [("tensor", c.c_uint32), ("region", c.c_uint32), ("start", c.c_int64 * 4),
                ("extent", c.c_int64 * 4), ("offset", c.c_uint64), ("stride", c.c_int64 * 4)]


class Quant(c.Structure):
    _fields_ = [("kind", c.c_int32), ("scale_format", c.c_int32), ("scales", c.c_uint32),
                ("block", c.c_int64 * 2), ("values", c.c_uint32), ("second", c.c_uint32),
                ("shared", c.c_uint32)]


class ModelConfig(c.Structure):
    _fields_ = [("family", c.c_char * 32), ("vocab_size", c.c_int64), ("hidden_size", c.c_int64),
                ("intermediate_size", c.c_int64), ("layers", c.c_int64), ("heads", c.c_int64),
                ("kv_heads", c.c_int64), ("head_dim", c.c_int64), ("max_positions", c.c_int64),
                ("rms_norm_eps", c.c_double), ("rope_theta", c.c_double), ("qkv_bias", c.c_int32),
                ("o_bias", c.c_int32), ("mlp_bias", c.c_int32), ("qk_norm", c.c_int32),
                ("tied", c.c_int32), ("dtype", c.c_int32), ("experts", c.c_int64),
                ("moe_intermediate_size", c.c_int64), ("shared_experts", c.c_int64),
                ("first_k_dense", c.c_int64), ("sparse_step", c.c_int64),
                ("dense_layers", c.c_uint64 * 8), ("q_lora_rank", c.c_int64),
                ("kv_lora_rank", c.c_int64), ("qk_nope_head_dim", c.c_int64),
                ("qk_rope_head_dim", c.c_int64), ("v_head_dim", c.c_int64),
                ("mtp_layers", c.c_int64), ("labels", c.c_int64), ("own", c.c_int64 * 32),
                ("kind_layers", c.c_uint64 * 8 * 3)]


class Placement(c.Structure):
    _fields_ = [("kind", c.c_int32), ("dim", c.c_int32), ("split_factor", c.c_int64)]


class Mesh(c.Structure):
    _fields_ = [("ndim", c.c_uint32), ("shape", c.c_int64 * 8), ("placements", Placement * 8)]


class FlatPiece(c.Structure):
    _fields_ = [("name", c.c_char_p), ("ndim", c.c_uint32), ("shape", c.c_int64 * 4),
                ("offset", c.c_int64), ("first", c.c_int64), ("last", c.c_int64)]


class FlatParameter(Sized):
    _fields_ = [("size", c.c_size_t), ("dtype", c.c_int32), ("prefix", c.c_char_p),
                ("numel", c.c_int64), ("padding", c.c_int64), ("pieces", c.POINTER(FlatPiece)),
                ("count", c.c_uint32), ("config", c.POINTER(ModelConfig))]


class Fsdp1Spec(Sized):
    _fields_ = [("size", c.c_size_t), ("rank", c.c_uint32), ("world", c.c_uint32),
                ("dtype", c.c_int32), ("use_orig_params", c.c_int32), ("compute_dtype", c.c_int32),
                ("kind", c.c_int32)]


class MegatronSpec(Sized):
    _fields_ = [("size", c.c_size_t), ("tp", c.c_uint32), ("cp", c.c_uint32), ("ep", c.c_uint32),
                ("etp", c.c_uint32), ("dp", c.c_uint32), ("pp", c.c_uint32), ("vpp", c.c_uint32),
                ("tp_rank", c.c_uint32), ("ep_rank", c.c_uint32), ("etp_rank", c.c_uint32),
                ("pp_rank", c.c_uint32), ("experts", c.c_int32), ("dtype", c.c_int32),
                ("kind", c.c_int32), ("vocab_multiple", c.c_int64),
                ("first_stage_layers", c.c_int64), ("last_stage_layers", c.c_int64),
                ("embedding_in_split", c.c_int32), ("loss_in_split", c.c_int32)]


class MegatronParameter(c.Structure):
    _fields_ = [("name", c.c_char * 192), ("vp_stage", c.c_uint32), ("dtype", c.c_int32),
                ("ndim", c.c_uint32), ("shape", c.c_int64 * 4), ("offset", c.c_uint64)]


class ExpertMap(Sized):
    _fields_ = [("size", c.c_size_t), ("version", c.c_uint64), ("layers", c.c_uint32),
                ("slots", c.c_uint32), ("experts", c.c_void_p)]


class EngineQuant(Sized):
    _fields_ = [("size", c.c_size_t), ("kind", c.c_int32), ("scale_format", c.c_int32),
                ("block", c.c_int64 * 2), ("ignore", c.POINTER(c.c_char_p)),
                ("ignore_count", c.c_uint32)]


class EngineSpec(Sized):
    _fields_ = [("size", c.c_size_t), ("tp", c.c_uint32), ("tp_rank", c.c_uint32),
                ("dtype", c.c_int32), ("vocab_multiple", c.c_int64), ("kind", c.c_int32),
                ("pp_layers", c.c_void_p), ("experts", c.POINTER(ExpertMap)),
                ("quant", c.POINTER(EngineQuant)), ("pp", c.c_uint32), ("pp_rank", c.c_uint32),
                ("ep", c.c_uint32), ("dp", c.c_uint32), ("engine", c.c_int32), ("draft", c.c_int32),
                ("dense_tp", c.c_uint32), ("shared_tp", c.c_uint32), ("embed_tp", c.c_uint32),
                ("head_tp", c.c_uint32), ("fuse_shared", c.c_int32), ("redundant", c.c_uint32),
                ("transposed", c.c_uint32), ("w13_order", c.c_int32)]


class SafetensorsOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("max_file_bytes", c.c_uint64), ("metadata_json", c.c_char_p),
                ("values_key", c.c_char_p), ("tensor_values", c.POINTER(c.c_char_p))]


class Handle(Sized):
    _fields_ = [("size", c.c_size_t), ("kind", c.c_int32), ("dtype", c.c_int32),
                ("ndim", c.c_uint32), ("shape", c.c_int64 * 4), ("stride", c.c_int64 * 4),
                ("offset", c.c_uint64), ("storage_bytes", c.c_uint64), ("device", c.c_uint8 * 16),
                ("owner_member", c.c_uint64), ("owner_epoch", c.c_uint64), ("key", c.c_uint8 * 64),
                ("event", c.c_uint8 * 64), ("path", c.c_char * 256), ("base_offset", c.c_uint64),
                ("base_bytes", c.c_uint64), ("allocation", c.c_uint64), ("form", c.c_int32)]


class CheckpointPart(c.Structure):
    _fields_ = [("name", c.c_char_p), ("layout", c.c_void_p), ("regions", c.POINTER(c.c_void_p))]


class CheckpointFile(c.Structure):
    _fields_ = [("name", c.c_char_p), ("data", c.c_void_p), ("bytes", c.c_size_t)]


class CheckpointOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("version", c.c_uint64), ("keep", c.c_uint32),
                ("rank", c.c_uint32), ("world", c.c_uint32), ("name", c.c_char_p),
                ("config_json", c.c_char_p), ("timeout_ns", c.c_int64), ("deltas", c.c_uint32),
                ("parts", c.POINTER(CheckpointPart)), ("files", c.POINTER(CheckpointFile)),
                ("part_count", c.c_uint32), ("file_count", c.c_uint32), ("stay", c.c_void_p),
                ("stay_count", c.c_uint32)]


class LoadOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("load", LoadFn), ("user", c.c_void_p),
                ("bucket_bytes", c.c_uint64), ("slices", c.c_int32),
                ("together", c.POINTER(c.c_char_p)), ("together_count", c.c_uint32),
                ("memory", c.c_int32)]


class PlanMember(c.Structure):
    _fields_ = [("layout", c.c_void_p), ("member", c.c_uint64), ("name", c.c_char_p),
                ("host", c.c_uint64), ("process", c.c_uint64), ("device", c.c_uint64)]


class PlanOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("stripe_bytes", c.c_uint64), ("allow_cast", c.c_uint32)]


class Copy(c.Structure):
    _fields_ = [("source", c.c_uint32), ("source_region", c.c_uint32),
                ("destination_region", c.c_uint32), ("tensor", c.c_uint32), ("ndim", c.c_uint32),
                ("source_dtype", c.c_int32), ("destination_dtype", c.c_int32),
                ("start", c.c_int64 * 4), ("extent", c.c_int64 * 4), ("source_offset", c.c_uint64),
                ("destination_offset", c.c_uint64), ("source_stride", c.c_int64 * 4),
                ("destination_stride", c.c_int64 * 4)]


class Transform(c.Structure):
    _fields_ = [("kind", c.c_int32), ("tensor", c.c_uint32), ("quant_dtype", c.c_int32),
                ("scale_format", c.c_int32), ("start", c.c_int64 * 4), ("extent", c.c_int64 * 4),
                ("cell", c.c_int64 * 4), ("first_read", c.c_uint64), ("reads", c.c_uint64),
                ("first_scale_read", c.c_uint64), ("scale_reads", c.c_uint64),
                ("first_write", c.c_uint64), ("writes", c.c_uint64), ("quant_kind", c.c_int32),
                ("most", c.c_uint32)]


class SubscriberOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("regions", c.POINTER(c.c_void_p)), ("group", c.c_char_p),
                ("rank", c.c_uint32), ("world", c.c_uint32), ("timeout_ns", c.c_int64),
                ("load", c.POINTER(LoadOptions)), ("staging", c.c_int32)]


class UpdateOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("mode", c.c_int32), ("strategy", c.c_int32),
                ("min_version", c.c_uint64), ("path", c.c_char_p), ("path_version", c.c_uint64),
                ("bucket_bytes", c.c_uint64), ("no_verify", c.c_int32), ("timeout_ns", c.c_int64),
                ("lease_ns", c.c_int64), ("no_peers", c.c_int32), ("ctas", c.c_uint32),
                ("copy_engines", c.c_int32), ("nccl_bytes", c.c_uint64),
                ("prefetch_seconds", c.c_double)]


class UpdateReport(Sized):
    _fields_ = [("size", c.c_size_t), ("version", c.c_uint64), ("incarnation", c.c_uint64),
                ("mode", c.c_int32), ("strategy", c.c_int32), ("bytes", c.c_uint64),
                ("source_bytes", c.c_uint64), ("link_bytes", c.c_uint64 * 5),
                ("copies", c.c_uint64), ("wait_ns", c.c_int64), ("plan_ns", c.c_int64),
                ("prepare_ns", c.c_int64), ("move_ns", c.c_int64), ("verify_ns", c.c_int64),
                ("commit_ns", c.c_int64), ("total_ns", c.c_int64), ("bytes_per_s", c.c_double),
                ("peak_extra_bytes", c.c_uint64), ("retries", c.c_uint32), ("planned", c.c_int32),
                ("verified_tensors", c.c_uint64), ("verified_bytes", c.c_uint64),
                ("delta_covered_bytes", c.c_uint64), ("delta_bytes", c.c_uint64),
                ("wire_bytes", c.c_uint64), ("source", c.c_int32), ("fanned_bytes", c.c_uint64),
                ("held_ns", c.c_int64), ("held_by", c.c_char * 128), ("device_ns", c.c_int64),
                ("steps", c.c_uint64), ("step_ns", c.c_int64), ("step_before_ns", c.c_int64),
                ("nccl_bytes", c.c_uint64), ("pause_ns", c.c_int64),
                ("exchanged_bytes", c.c_uint64), ("spare_bytes", c.c_uint64),
                ("spare_waste_bytes", c.c_uint64)]


class Gpu(Sized):
    _fields_ = [("size", c.c_size_t), ("uuid", c.c_uint8 * 16), ("uuid_text", c.c_char * 48),
                ("name", c.c_char * 128), ("pci", c.c_char * 32), ("bytes", c.c_uint64),
                ("ordinal", c.c_int32), ("arch", c.c_int32), ("multiprocessors", c.c_int32)]


class GpuStorage(Sized):
    _fields_ = [("size", c.c_size_t), ("uuid", c.c_uint8 * 16), ("base", c.c_uint64),
                ("bytes", c.c_uint64), ("allocation", c.c_uint64), ("form", c.c_int32)]


class ArenaOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("tag", c.c_char_p), ("uuid", c.c_uint8 * 16),
                ("address_bytes", c.c_uint64), ("chunk_bytes", c.c_uint64), ("peers", c.c_int32)]


class ArenaStatus(Sized):
    _fields_ = [("size", c.c_size_t), ("base", c.c_uint64), ("address_bytes", c.c_uint64),
                ("resident_bytes", c.c_uint64), ("used_bytes", c.c_uint64),
                ("pinned_bytes", c.c_uint64), ("chunks", c.c_uint32), ("allocations", c.c_uint32),
                ("exported", c.c_uint32), ("released", c.c_int32)]


class ArenaReleaseOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("drop", c.c_int32), ("force", c.c_int32),
                ("after", c.POINTER(Fence)), ("timeout_ns", c.c_int64)]


class ArenaResumeOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("free_pinned", c.c_int32), ("timeout_ns", c.c_int64)]


class ArenaReport(Sized):
    _fields_ = [("size", c.c_size_t), ("arenas", c.c_uint32), ("chunks", c.c_uint32),
                ("bytes", c.c_uint64), ("copied_bytes", c.c_uint64), ("pin_ns", c.c_int64),
                ("copy_ns", c.c_int64), ("total_ns", c.c_int64)]


class LeaseOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("timeout_ns", c.c_int64), ("term_ns", c.c_int64)]


class QueueTask(c.Structure):
    _fields_ = [("name", c.c_char_p), ("needs", c.POINTER(c.c_char_p)), ("needs_count", c.c_uint32),
                ("writes", c.POINTER(c.c_char_p)), ("writes_count", c.c_uint32)]


class QueueOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("tasks", c.POINTER(QueueTask)), ("task_count", c.c_uint32),
                ("capacity_rows", c.c_uint64), ("capacity_bytes", c.c_uint64),
                ("max_attempts", c.c_uint32), ("timeout_ns", c.c_int64), ("on_loss", c.c_int32),
                ("provisional_count", c.c_uint32), ("provisional", c.POINTER(c.c_char_p)),
                ("batch_rows", c.c_uint32), ("open_batches", c.c_uint32),
                ("checkpoint_batches", c.c_uint32), ("row_bytes", c.c_uint64),
                ("durability", c.c_int32), ("restore", c.c_char_p), ("backend", c.c_int32),
                ("backend_address", c.c_char_p)]


class ColumnData(c.Structure):
    _fields_ = [("name", c.c_char_p), ("dtype", c.c_int32), ("content", c.c_int32),
                ("ndim", c.c_uint32), ("shape", c.c_int64 * 4), ("offsets", c.c_void_p),
                ("values", c.c_void_p), ("bytes", c.c_uint64)]


class Tag(c.Structure):
    _fields_ = [("key", c.c_char_p), ("number", c.c_double)]


class RowTag(c.Structure):
    _fields_ = [("row", c.c_uint32), ("key", c.c_char_p), ("number", c.c_double)]


class Row(c.Structure):
    _fields_ = [("slot", c.c_uint32), ("generation", c.c_uint32), ("attempt", c.c_uint32),
                ("group", c.c_uint32), ("id", c.c_uint64)]


class InsertOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("partition", c.c_char_p), ("rows", c.c_uint32),
                ("group_size", c.c_uint32), ("once_per_group", c.c_int32),
                ("columns", c.POINTER(ColumnData)), ("column_count", c.c_uint32),
                ("tags", c.POINTER(Tag)), ("tag_count", c.c_uint32), ("row_bytes", c.c_uint64),
                ("timeout_ns", c.c_int64), ("at_slot", c.c_uint64), ("refill", c.c_uint64),
                ("row_tags", c.POINTER(RowTag)), ("row_tag_count", c.c_uint32),
                ("known_only", c.c_uint32)]


class Refill(Sized):
    _fields_ = [("size", c.c_size_t), ("id", c.c_uint64), ("rows", c.c_uint32),
                ("slot", c.c_uint32), ("group", c.c_uint32), ("attempts", c.c_uint32),
                ("cause", c.c_int32), ("partition", c.c_char * 256), ("task", c.c_char * 256),
                ("reason", c.c_char * 208)]


class Admission(Sized):
    _fields_ = [("size", c.c_size_t), ("task", c.c_char_p), ("batch_rows", c.c_uint32),
                ("staleness", c.c_uint32), ("concurrency", c.c_uint32), ("resume", c.c_int32),
                ("version", c.c_uint64)]


class Blob(c.Structure):
    _fields_ = [("data", c.c_void_p), ("size", c.c_uint64)]


class PutOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("partition", c.c_char_p), ("rows", c.c_uint32),
                ("keys", c.POINTER(c.c_char_p)), ("at", c.POINTER(Row)),
                ("columns", c.POINTER(ColumnData)), ("column_count", c.c_uint32),
                ("tags", c.POINTER(Blob)), ("timeout_ns", c.c_int64)]


class GetOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("partition", c.c_char_p), ("rows", c.c_uint32),
                ("keys", c.POINTER(c.c_char_p)), ("at", c.POINTER(Row)),
                ("columns", c.POINTER(c.c_char_p)), ("column_count", c.c_uint32),
                ("all_columns", c.c_uint32), ("partial", c.c_uint32), ("task", c.c_char_p),
                ("peek", c.c_uint32), ("count", c.c_uint32), ("up_to", c.c_uint32),
                ("timeout_ns", c.c_int64)]


class ClaimOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("task", c.c_char_p), ("partition", c.c_char_p),
                ("count", c.c_uint32), ("up_to", c.c_int32), ("policy", c.c_int32),
                ("timeout_ns", c.c_int64), ("max_hold_ns", c.c_int64), ("fresh", c.c_int32),
                ("staleness", c.c_uint32), ("version", c.c_uint64), ("group", c.c_char_p),
                ("group_epoch", c.c_uint64), ("round", c.c_uint64), ("token_cap", c.c_uint64),
                ("cost", c.c_char_p), ("dp_rank", c.c_uint32), ("dp_size", c.c_uint32),
                ("peer", c.c_uint32), ("peers", c.c_uint32), ("micro_rows", c.c_uint32)]


class Column(c.Structure):
    _fields_ = [("dtype", c.c_int32), ("content", c.c_int32), ("ndim", c.c_uint32),
                ("shape", c.c_int64 * 4), ("cells", c.c_void_p), ("lengths", c.c_void_p)]


class ColumnPart(c.Structure):
    _fields_ = [("dtype", c.c_int32), ("content", c.c_int32), ("ndim", c.c_uint32),
                ("copied", c.c_uint32), ("shape", c.c_int64 * 4), ("bytes", c.c_uint64),
                ("values", c.c_void_p)]


class Piece(c.Structure):
    _fields_ = [("elements", c.c_uint64), ("version", c.c_double)]


class LoaderOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("claim", c.POINTER(ClaimOptions)), ("ahead", c.c_uint32),
                ("ahead_rows", c.c_uint32), ("ahead_bytes", c.c_uint64), ("micro", c.c_int32)]


class Load(Sized):
    _fields_ = [("size", c.c_size_t), ("batch", c.c_void_p), ("number", c.c_uint64),
                ("first", c.c_uint32), ("rows", c.c_uint32), ("micro", c.c_uint32),
                ("micros", c.c_uint32)]


class LoaderCounts(Sized):
    _fields_ = [("size", c.c_size_t), ("batches", c.c_uint64), ("rows", c.c_uint64),
                ("committed", c.c_uint64), ("lost", c.c_uint64), ("waits", c.c_uint64),
                ("waited_ns", c.c_int64), ("ready", c.c_uint32), ("unfinished", c.c_uint32)]


class PublisherOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("regions", c.POINTER(c.c_void_p)), ("rank", c.c_uint32),
                ("world", c.c_uint32), ("no_checksums", c.c_int32), ("timeout_ns", c.c_int64),
                ("delta", c.c_int32), ("delta_dtype", c.c_int32), ("snapshot", c.c_int32),
                ("staging_bytes", c.c_uint64)]


class Pin(c.Structure):
    _fields_ = [("member", c.c_uint64), ("bytes", c.c_uint64), ("name", c.c_char * 112)]


class StepsRules(Sized):
    _fields_ = [("size", c.c_size_t), ("oldest", c.c_int64), ("newest", c.c_int64),
                ("open", c.c_int64), ("kept", c.c_int64), ("last", c.c_int64), ("rows", c.c_uint32),
                ("group", c.c_uint32), ("fresh", c.c_uint32), ("exact", c.c_int32),
                ("first_complete", c.c_int32), ("in_turns", c.c_int32), ("tagged", c.c_int32)]


class TaskOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("name", c.c_char_p), ("queue", c.c_char_p),
                ("micro_batch", c.c_uint32), ("exact", c.c_int32), ("policy", c.c_int32),
                ("timeout_ns", c.c_int64)]


FUNCTIONS = {
    "dray_arena_alloc": (CODE, [c.c_void_p, c.c_uint64, c.c_void_p]),
    "dray_arena_close": (None, [c.c_void_p]),
    "dray_arena_free": (CODE, [c.c_void_p, c.c_uint64]),
    "dray_arena_get_status": (CODE, [c.c_void_p, c.POINTER(ArenaStatus)]),
    "dray_arena_open": (CODE, [c.POINTER(ArenaOptions), c.c_void_p]),
    "dray_arena_prepare": (CODE, [c.c_char_p, c.POINTER(ArenaReport)]),
    "dray_arena_release": (CODE, [c.c_char_p, c.POINTER(ArenaReleaseOptions),
        c.POINTER(ArenaReport)]),
    "dray_arena_resume": (CODE, [c.c_char_p, c.POINTER(ArenaResumeOptions),
        c.POINTER(ArenaReport)]),
    "dray_barrier": (CODE, [c.c_void_p, c.c_char_p, c.c_uint32, c.c_int64]),
    "dray_batch_cell": (CODE, [c.c_void_p, c.c_char_p, c.c_uint32, c.POINTER(ColumnPart)]),
    "dray_batch_column": (CODE, [c.c_void_p, c.c_char_p, c.POINTER(Column)]),
    "dray_batch_column_name": (c.c_char_p, [c.c_void_p, c.c_uint32]),
    "dray_batch_commit": (CODE, [c.c_void_p]),
    "dray_batch_commit_claim": (CODE, [c.c_void_p, c.POINTER(ClaimOptions), c.c_uint32, c.c_void_p,
        c.c_void_p]),
    "dray_batch_export": (CODE, [c.c_void_p, c.c_void_p, c.c_void_p]),
    "dray_batch_fail": (CODE, [c.c_void_p, c.c_void_p, c.c_uint32, c.c_char_p]),
    "dray_batch_free": (None, [c.c_void_p]),
    "dray_batch_gather": (CODE, [c.c_void_p, c.c_char_p, c.c_void_p, c.c_size_t, c.c_void_p]),
    "dray_batch_gather_rows": (CODE, [c.c_void_p, c.c_char_p, c.c_uint32, c.c_uint32, c.c_void_p,
        c.c_size_t, c.c_void_p]),
    "dray_batch_give_back": (CODE, [c.c_void_p]),
    "dray_batch_hold": (CODE, [c.c_void_p, c.c_int64]),
    "dray_batch_import": (CODE, [c.c_void_p, c.c_void_p, c.c_size_t, c.c_void_p]),
    "dray_batch_key": (c.c_char_p, [c.c_void_p, c.c_uint32]),
    "dray_batch_leave_open": (CODE, [c.c_void_p, c.c_void_p, c.c_uint32]),
    "dray_batch_micro": (CODE, [c.c_void_p, c.c_uint32, c.c_void_p, c.c_void_p]),
    "dray_batch_micros": (c.c_uint32, [c.c_void_p]),
    "dray_batch_own": (CODE, [c.c_void_p, c.c_char_p, c.c_uint32, c.c_uint32, c.c_void_p]),
    "dray_batch_partition": (c.c_char_p, [c.c_void_p]),
    "dray_batch_pieces": (CODE, [c.c_void_p, c.c_char_p, c.c_uint32, c.POINTER(Piece), c.c_uint32,
        c.c_void_p]),
    "dray_batch_read": (CODE, [c.c_void_p, c.c_char_p, c.c_uint32, c.c_uint32,
        c.POINTER(ColumnPart), c.c_void_p, c.c_void_p, c.c_size_t]),
    "dray_batch_row": (c.c_void_p, [c.c_void_p, c.c_uint32]),
    "dray_batch_row_tag": (Blob, [c.c_void_p, c.c_uint32]),
    "dray_batch_rows": (c.c_uint32, [c.c_void_p]),
    "dray_batch_set": (CODE, [c.c_void_p, c.POINTER(ColumnData)]),
    "dray_batch_set_tag": (CODE, [c.c_void_p, c.c_uint32, c.c_char_p, c.c_double]),
    "dray_batch_set_tags": (CODE, [c.c_void_p, c.c_char_p, c.c_uint32, c.c_uint32, c.c_void_p]),
    "dray_batch_split": (CODE, [c.c_void_p, c.c_void_p, c.c_uint32, c.c_void_p]),
    "dray_batch_tag": (CODE, [c.c_void_p, c.c_uint32, c.c_char_p, c.c_void_p]),
    "dray_batch_tags": (CODE, [c.c_void_p, c.c_char_p, c.c_uint32, c.c_uint32, c.c_void_p]),
    "dray_batch_waited_for": (c.c_int, [c.c_void_p]),
    "dray_batch_weight": (c.c_double, [c.c_void_p, c.c_uint32]),
    "dray_batch_weights": (CODE, [c.c_void_p, c.c_uint32, c.c_uint32, c.c_void_p]),
    "dray_checkpoint_get": (CODE, [c.c_char_p, c.c_char_p, c.c_void_p, c.c_void_p]),
    "dray_checkpoint_latest": (CODE, [c.c_char_p, c.c_void_p, c.c_void_p]),
    "dray_checkpoint_layout": (CODE, [c.c_char_p, c.c_void_p, c.c_void_p]),
    "dray_checkpoint_read": (CODE, [c.c_char_p, c.c_void_p, c.c_void_p]),
    "dray_checkpoint_save": (CODE, [c.c_void_p, c.c_char_p, c.c_void_p, c.c_void_p,
        c.POINTER(CheckpointOptions)]),
    "dray_checkpoint_write": (CODE, [c.c_char_p, c.c_void_p, c.c_void_p, c.c_char_p]),
    "dray_checksums_compute": (CODE, [c.c_void_p, c.c_void_p, c.c_void_p]),
    "dray_checksums_count": (c.c_uint32, [c.c_void_p]),
    "dray_checksums_entry": (CODE, [c.c_void_p, c.c_uint32, c.c_void_p, c.c_void_p, c.c_void_p,
        c.c_void_p]),
    "dray_checksums_fetch": (CODE, [c.c_void_p, c.c_char_p, c.c_void_p, c.c_void_p]),
    "dray_checksums_fetch_group": (CODE, [c.c_void_p, c.c_char_p, c.c_char_p, c.c_void_p,
        c.c_void_p]),
    "dray_checksums_free": (None, [c.c_void_p]),
    "dray_checksums_of_checkpoint": (CODE, [c.c_char_p, c.c_void_p, c.c_void_p]),
    "dray_close": (None, [c.c_void_p]),
    "dray_commit_start": (CODE, [c.c_void_p, c.POINTER(UpdateOptions)]),
    "dray_commit_weights": (CODE, [c.c_void_p, c.POINTER(UpdateOptions), c.POINTER(UpdateReport)]),
    "dray_context_epoch": (c.c_uint64, [c.c_void_p]),
    "dray_context_member": (c.c_uint64, [c.c_void_p]),
    "dray_context_status": (CODE, [c.c_void_p, c.c_void_p]),
    "dray_dtype_name": (c.c_char_p, [c.c_int]),
    "dray_dtype_parse": (c.c_int, [c.c_char_p]),
    "dray_dtype_size": (c.c_size_t, [c.c_int]),
    "dray_engine_parameter": (CODE, [c.POINTER(ModelConfig), c.POINTER(EngineSpec), c.c_char_p,
        c.c_void_p, c.c_void_p, c.c_void_p]),
    "dray_engine_quant_free": (None, [c.POINTER(EngineQuant)]),
    "dray_engine_quant_load": (CODE, [c.c_char_p, c.c_void_p]),
    "dray_engines_close": (None, [c.c_void_p]),
    "dray_engines_count": (c.c_uint32, [c.c_void_p]),
    "dray_engines_entry": (CODE, [c.c_void_p, c.c_uint32, c.POINTER(EngineInfo)]),
    "dray_engines_fd": (c.c_int, [c.c_void_p]),
    "dray_engines_open": (CODE, [c.c_void_p, c.c_void_p]),
    "dray_engines_poll": (CODE, [c.c_void_p, c.c_void_p, c.c_void_p]),
    "dray_engines_wait": (CODE, [c.c_void_p, c.c_int64, c.c_void_p, c.c_void_p]),
    "dray_error_name": (c.c_char_p, [c.c_int]),
    "dray_free": (None, [c.c_void_p]),
    "dray_gpu_count": (CODE, [c.c_void_p, c.c_void_p]),
    "dray_gpu_get": (CODE, [c.c_int32, c.POINTER(Gpu)]),
    "dray_gpu_get_link": (CODE, [c.c_int32, c.c_int32, c.c_void_p]),
    "dray_gpu_library": (CODE, [c.c_char_p, c.c_char_p, c.c_size_t]),
    "dray_gpu_measure": (CODE, [c.c_int32, c.c_int32, c.c_void_p]),
    "dray_gpu_memory": (CODE, [c.c_int32, c.c_void_p, c.c_void_p]),
    "dray_gpu_storage_of": (CODE, [c.c_uint64, c.POINTER(GpuStorage)]),
    "dray_handle_describe": (CODE, [c.c_void_p, c.POINTER(Handle)]),
    "dray_handle_pack": (CODE, [c.POINTER(Handle), c.c_void_p, c.c_size_t]),
    "dray_handle_packed_size": (c.c_size_t, []),
    "dray_handle_unpack": (CODE, [c.c_void_p, c.c_size_t, c.POINTER(Handle)]),
    "dray_layout_add_alias": (CODE, [c.c_void_p, c.c_char_p, c.c_uint32, c.c_void_p]),
    "dray_layout_add_block": (CODE, [c.c_void_p, c.POINTER(Block)]),
    "dray_layout_add_dense": (CODE, [c.c_void_p, c.c_uint32, c.c_uint32, c.c_void_p, c.c_void_p,
        c.c_uint64]),
    "dray_layout_add_dtensor": (CODE, [c.c_void_p, c.c_uint32, c.c_uint32, c.c_uint64,
        c.POINTER(Mesh), c.c_void_p, c.c_void_p]),
    "dray_layout_add_flat": (CODE, [c.c_void_p, c.c_uint32, c.c_uint64, c.POINTER(FlatParameter)]),
    "dray_layout_add_megatron": (CODE, [c.c_void_p, c.POINTER(ModelConfig), c.POINTER(MegatronSpec),
        c.c_uint32, c.c_char_p, c.c_int, c.c_uint32, c.c_void_p, c.c_uint32, c.c_uint64]),
    "dray_layout_add_module": (CODE, [c.c_void_p, c.POINTER(ModelConfig), c.c_char_p, c.c_int,
        c.c_uint32, c.c_uint64, c.POINTER(Mesh), c.c_void_p, c.c_void_p]),
    "dray_layout_add_range": (CODE, [c.c_void_p, c.c_uint32, c.c_uint32, c.c_uint64, c.c_int64,
        c.c_int64]),
    "dray_layout_add_region": (CODE, [c.c_void_p, c.POINTER(RegionInfo), c.c_void_p]),
    "dray_layout_add_tensor": (CODE, [c.c_void_p, c.c_char_p, c.c_int, c.c_uint32, c.c_void_p,
        c.c_void_p]),
    "dray_layout_block": (c.c_void_p, [c.c_void_p, c.c_uint32]),
    "dray_layout_block_count": (c.c_uint32, [c.c_void_p]),
    "dray_layout_bytes": (c.c_uint64, [c.c_void_p]),
    "dray_layout_engine": (CODE, [c.POINTER(ModelConfig), c.POINTER(EngineSpec), c.c_void_p]),
    "dray_layout_find": (CODE, [c.c_void_p, c.c_char_p, c.c_void_p]),
    "dray_layout_free": (None, [c.c_void_p]),
    "dray_layout_fsdp": (CODE, [c.POINTER(ModelConfig), c.c_int, c.c_uint32, c.c_uint32, c.c_int,
        c.c_void_p]),
    "dray_layout_fsdp1": (CODE, [c.POINTER(ModelConfig), c.POINTER(Fsdp1Spec), c.c_void_p]),
    "dray_layout_full": (CODE, [c.POINTER(ModelConfig), c.c_int, c.c_int, c.c_void_p]),
    "dray_layout_megatron": (CODE, [c.POINTER(ModelConfig), c.POINTER(MegatronSpec), c.c_void_p]),
    "dray_layout_new": (CODE, [c.c_void_p]),
    "dray_layout_pack": (CODE, [c.c_void_p, c.c_void_p, c.c_void_p]),
    "dray_layout_prove": (CODE, [c.c_void_p, c.c_void_p, c.c_char_p, c.c_void_p, c.c_void_p]),
    "dray_layout_quant": (c.c_void_p, [c.c_void_p, c.c_uint32]),
    "dray_layout_region": (c.c_void_p, [c.c_void_p, c.c_uint32]),
    "dray_layout_region_count": (c.c_uint32, [c.c_void_p]),
    "dray_layout_safetensors": (CODE, [c.c_char_p, c.c_void_p]),
    "dray_layout_set_quant": (CODE, [c.c_void_p, c.c_uint32, c.POINTER(Quant)]),
    "dray_layout_tensor": (c.c_void_p, [c.c_void_p, c.c_uint32]),
    "dray_layout_tensor_count": (c.c_uint32, [c.c_void_p]),
    "dray_layout_unpack": (CODE, [c.c_void_p, c.c_size_t, c.c_void_p]),
    "dray_layouts_from_spec": (CODE, [c.POINTER(ModelConfig), c.c_char_p, c.c_void_p, c.c_void_p]),
    "dray_lease_acquire": (CODE, [c.c_void_p, c.c_void_p, c.c_uint32, c.POINTER(LeaseOptions),
        c.c_void_p]),
    "dray_lease_check": (CODE, [c.c_void_p, c.c_void_p]),
    "dray_lease_number": (c.c_uint64, [c.c_void_p]),
    "dray_lease_release": (CODE, [c.c_void_p]),
    "dray_link_name": (c.c_char_p, [c.c_int]),
    "dray_loader_close": (None, [c.c_void_p]),
    "dray_loader_count": (CODE, [c.c_void_p, c.POINTER(LoaderCounts)]),
    "dray_loader_done": (CODE, [c.c_void_p, c.POINTER(Load)]),
    "dray_loader_fail": (CODE, [c.c_void_p, c.POINTER(Load), c.c_char_p]),
    "dray_loader_flush": (CODE, [c.c_void_p]),
    "dray_loader_hold": (CODE, [c.c_void_p, c.POINTER(Load)]),
    "dray_loader_next": (CODE, [c.c_void_p, c.c_int64, c.POINTER(Load)]),
    "dray_loader_open": (CODE, [c.c_void_p, c.POINTER(LoaderOptions), c.c_void_p]),
    "dray_loader_unhold": (None, [c.c_void_p, c.c_void_p]),
    "dray_megatron_parameters": (CODE, [c.POINTER(ModelConfig), c.POINTER(MegatronSpec), c.c_void_p,
        c.c_void_p]),
    "dray_megatron_place": (CODE, [c.POINTER(MegatronSpec), c.c_uint32, c.c_void_p]),
    "dray_model_config_load": (CODE, [c.c_char_p, c.POINTER(ModelConfig)]),
    "dray_model_name": (c.c_char_p, [c.c_uint32]),
    "dray_open": (CODE, [c.POINTER(Options), c.c_void_p]),
    "dray_own_free": (None, [c.c_void_p]),
    "dray_plan_bytes": (c.c_uint64, [c.c_void_p, c.c_int]),
    "dray_plan_copies": (c.c_void_p, [c.c_void_p]),
    "dray_plan_count": (c.c_uint64, [c.c_void_p]),
    "dray_plan_free": (None, [c.c_void_p]),
    "dray_plan_from_index": (CODE, [c.c_void_p, c.POINTER(PlanMember), c.POINTER(PlanOptions),
        c.c_void_p]),
    "dray_plan_index_free": (None, [c.c_void_p]),
    "dray_plan_index_new": (CODE, [c.POINTER(PlanMember), c.c_uint32, c.c_void_p]),
    "dray_plan_largest_copy": (c.c_uint64, [c.c_void_p]),
    "dray_plan_new": (CODE, [c.POINTER(PlanMember), c.c_uint32, c.POINTER(PlanMember),
        c.POINTER(PlanOptions), c.c_void_p]),
    "dray_plan_reads": (c.c_void_p, [c.c_void_p]),
    "dray_plan_source_bytes": (c.c_uint64, [c.c_void_p, c.c_uint32]),
    "dray_plan_source_link": (c.c_int, [c.c_void_p, c.c_uint32]),
    "dray_plan_total_bytes": (c.c_uint64, [c.c_void_p]),
    "dray_plan_transform_count": (c.c_uint64, [c.c_void_p]),
    "dray_plan_transforms": (c.c_void_p, [c.c_void_p]),
    "dray_plan_writes": (c.c_void_p, [c.c_void_p]),
    "dray_prefetch_drop": (CODE, [c.c_void_p]),
    "dray_prefetch_start": (CODE, [c.c_void_p, c.POINTER(UpdateOptions)]),
    "dray_prefetch_weights": (CODE, [c.c_void_p, c.POINTER(UpdateOptions),
        c.POINTER(UpdateReport)]),
    "dray_publisher_close": (None, [c.c_void_p]),
    "dray_publisher_deliver": (CODE, [c.c_void_p, c.c_uint64, c.c_void_p, c.c_uint32, c.c_int64]),
    "dray_publisher_move": (CODE, [c.c_void_p, c.c_void_p]),
    "dray_publisher_open": (CODE, [c.c_void_p, c.c_char_p, c.c_void_p, c.POINTER(PublisherOptions),
        c.c_void_p]),
    "dray_publisher_publish": (CODE, [c.c_void_p, c.c_uint64, c.POINTER(Fence)]),
    "dray_publisher_release": (CODE, [c.c_void_p, c.c_int64, c.POINTER(Pin), c.c_uint32,
        c.c_void_p]),
    "dray_publisher_set_layout": (CODE, [c.c_void_p, c.c_void_p, c.c_void_p]),
    "dray_publisher_wait": (CODE, [c.c_void_p, c.c_uint64, c.c_int64, c.c_void_p]),
    "dray_publisher_wait_stream": (CODE, [c.c_void_p, c.c_uint64, c.c_void_p, c.c_int64]),
    "dray_queue_admit": (CODE, [c.c_void_p, c.POINTER(Admission)]),
    "dray_queue_backend_built": (c.c_int, [c.c_int32]),
    "dray_queue_checkpoint": (CODE, [c.c_void_p, c.c_char_p]),
    "dray_queue_claim": (CODE, [c.c_void_p, c.POINTER(ClaimOptions), c.c_void_p]),
    "dray_queue_claim_any": (CODE, [c.c_void_p, c.POINTER(ClaimOptions), c.c_uint32, c.c_void_p,
        c.c_void_p]),
    "dray_queue_claim_poll": (CODE, [c.c_void_p, c.c_void_p, c.c_void_p]),
    "dray_queue_claim_start": (CODE, [c.c_void_p, c.POINTER(ClaimOptions), c.c_uint32]),
    "dray_queue_clear": (CODE, [c.c_void_p, c.c_char_p]),
    "dray_queue_clear_rows": (CODE, [c.c_void_p, c.c_char_p, c.c_void_p, c.POINTER(Row),
        c.c_uint32]),
    "dray_queue_close": (None, [c.c_void_p]),
    "dray_queue_covered": (CODE, [c.c_void_p, c.c_void_p, c.c_size_t]),
    "dray_queue_cursor": (CODE, [c.c_void_p, c.c_uint64, c.c_void_p, c.c_void_p]),
    "dray_queue_end": (CODE, [c.c_void_p]),
    "dray_queue_fd": (c.c_int, [c.c_void_p]),
    "dray_queue_get": (CODE, [c.c_void_p, c.POINTER(GetOptions), c.c_void_p]),
    "dray_queue_insert": (CODE, [c.c_void_p, c.POINTER(InsertOptions), c.c_void_p]),
    "dray_queue_open": (CODE, [c.c_void_p, c.c_char_p, c.POINTER(QueueOptions), c.c_void_p]),
    "dray_queue_put": (CODE, [c.c_void_p, c.POINTER(PutOptions), c.POINTER(Row)]),
    "dray_queue_refill_decline": (CODE, [c.c_void_p, c.c_uint64]),
    "dray_queue_refill_wait": (CODE, [c.c_void_p, c.c_int64, c.POINTER(Refill)]),
    "dray_queue_reset": (CODE, [c.c_void_p, c.c_char_p, c.c_char_p]),
    "dray_queue_resume": (CODE, [c.c_void_p, c.c_void_p, c.c_size_t, c.c_void_p]),
    "dray_queue_seal": (CODE, [c.c_void_p, c.c_char_p, c.c_uint32]),
    "dray_queue_status": (CODE, [c.c_void_p, c.c_void_p]),
    "dray_queue_version": (CODE, [c.c_void_p, c.c_uint64]),
    "dray_queue_wait": (CODE, [c.c_void_p, c.c_char_p, c.c_char_p, c.c_int64]),
    "dray_region_alloc": (CODE, [c.c_int, c.c_uint64, c.c_char_p, c.c_void_p]),
    "dray_region_base": (c.c_void_p, [c.c_void_p]),
    "dray_region_bytes": (c.c_uint64, [c.c_void_p]),
    "dray_region_check": (CODE, [c.c_void_p]),
    "dray_region_device": (CODE, [c.c_void_p, c.c_void_p]),
    "dray_region_device_address": (c.c_uint64, [c.c_void_p]),
    "dray_region_fd": (c.c_int, [c.c_void_p]),
    "dray_region_free": (None, [c.c_void_p]),
    "dray_region_get_kind": (c.c_int, [c.c_void_p]),
    "dray_region_import": (CODE, [c.POINTER(Handle), c.c_int, c.c_int, c.c_void_p]),
    "dray_region_kind_name": (c.c_char_p, [c.c_int]),
    "dray_region_name": (c.c_char_p, [c.c_void_p]),
    "dray_region_open": (CODE, [c.c_char_p, c.c_int, c.c_void_p]),
    "dray_region_read": (CODE, [c.c_void_p, c.c_uint64, c.c_void_p, c.c_uint64]),
    "dray_region_unexport": (None, [c.c_void_p]),
    "dray_region_wrap": (CODE, [c.c_void_p, c.c_uint64, c.c_char_p, c.c_void_p]),
    "dray_region_wrap_cuda": (CODE, [c.c_uint64, c.c_uint64, c.c_char_p, c.c_void_p]),
    "dray_region_write": (CODE, [c.c_void_p, c.c_uint64, c.c_void_p, c.c_uint64]),
    "dray_regions_for_layout": (CODE, [c.c_void_p, c.c_int, c.c_void_p]),
    "dray_report_post": (CODE, [c.c_void_p, c.c_char_p, c.c_char_p]),
    "dray_safetensors_begin": (CODE, [c.c_char_p, c.c_void_p, c.POINTER(SafetensorsOptions),
        c.c_void_p]),
    "dray_safetensors_finish": (CODE, [c.c_char_p, c.c_void_p]),
    "dray_set_interrupt": (None, [c.c_void_p]),
    "dray_set_log": (None, [c.c_void_p, c.c_void_p, c.c_int]),
    "dray_steps_claim": (c.c_uint32, [c.c_void_p, c.c_uint32, c.POINTER(ClaimOptions)]),
    "dray_steps_close": (None, [c.c_void_p]),
    "dray_steps_feed": (CODE, [c.c_void_p, c.c_void_p]),
    "dray_steps_next": (None, [c.c_void_p]),
    "dray_steps_open": (CODE, [c.POINTER(StepsRules), c.c_char_p, c.c_int64, c.c_void_p]),
    "dray_steps_take": (CODE, [c.c_void_p, c.c_void_p]),
    "dray_steps_versions": (CODE, [c.POINTER(StepsRules), c.c_void_p, c.c_void_p, c.c_void_p]),
    "dray_store_find": (CODE, [c.c_char_p, c.c_char_p, c.c_size_t]),
    "dray_strerror": (c.c_char_p, [c.c_int]),
    "dray_subscriber_close": (None, [c.c_void_p]),
    "dray_subscriber_fd": (c.c_int, [c.c_void_p]),
    "dray_subscriber_leave": (CODE, [c.c_void_p, c.c_int64, c.c_void_p]),
    "dray_subscriber_note_step": (CODE, [c.c_void_p, c.c_int64]),
    "dray_subscriber_open": (CODE, [c.c_void_p, c.c_char_p, c.c_void_p,
        c.POINTER(SubscriberOptions), c.c_void_p]),
    "dray_subscriber_release_mappings": (CODE, [c.c_void_p]),
    "dray_subscriber_verify": (CODE, [c.c_void_p]),
    "dray_subscriber_version": (CODE, [c.c_void_p, c.c_void_p, c.c_void_p, c.c_void_p]),
    "dray_task_close": (None, [c.c_void_p]),
    "dray_task_next": (CODE, [c.c_void_p, c.c_void_p]),
    "dray_task_open": (CODE, [c.c_void_p, c.c_void_p, c.POINTER(TaskOptions), c.c_void_p]),
    "dray_tensor_list_add": (CODE, [c.c_void_p, c.c_char_p, c.POINTER(Handle), c.c_void_p,
        c.c_uint32]),
    "dray_tensor_list_count": (c.c_uint32, [c.c_void_p]),
    "dray_tensor_list_flush_cache": (c.c_int32, [c.c_void_p]),
    "dray_tensor_list_free": (None, [c.c_void_p]),
    "dray_tensor_list_load": (CODE, [c.c_void_p, c.c_uint32, c.c_void_p, c.c_void_p]),
    "dray_tensor_list_load_format": (c.c_char_p, [c.c_void_p]),
    "dray_tensor_list_new": (CODE, [c.c_char_p, c.c_int32, c.c_void_p]),
    "dray_tensor_list_open": (CODE, [c.c_void_p, c.c_uint32, c.c_uint32, c.c_void_p,
        c.POINTER(Handle), c.c_void_p]),
    "dray_tensor_list_pack": (CODE, [c.c_void_p, c.c_void_p, c.c_void_p, c.c_void_p, c.c_void_p]),
    "dray_tensor_list_ranks": (c.c_uint32, [c.c_void_p]),
    "dray_tensor_list_unpack": (CODE, [c.c_void_p, c.c_size_t, c.c_void_p, c.c_uint32, c.c_void_p]),
    "dray_torch_arena": (CODE, [c.c_char_p, c.c_int, c.POINTER(ArenaOptions), c.c_void_p]),
    "dray_torch_free": (None, [c.c_void_p, c.c_ssize_t, c.c_int, c.c_void_p]),
    "dray_torch_malloc": (c.c_void_p, [c.c_ssize_t, c.c_int, c.c_void_p]),
    "dray_torch_use": (CODE, [c.c_char_p]),
    "dray_trace_enter": (None, [c.c_int, c.c_char_p, c.c_int64]),
    "dray_trace_flush": (CODE, []),
    "dray_trace_is_on": (c.c_int, []),
    "dray_trace_leave": (None, []),
    "dray_trace_merge": (CODE, [c.c_char_p, c.c_char_p]),
    "dray_trace_now": (c.c_int64, []),
    "dray_trace_open": (CODE, [c.c_char_p, c.c_char_p]),
    "dray_trace_queued": (None, []),
    "dray_trace_response": (None, [c.c_int64, c.c_uint32, c.c_uint64, c.c_uint64, c.c_int64,
        c.c_int64]),
    "dray_trace_samples": (None, [c.c_char_p, c.c_char_p, c.c_int64]),
    "dray_trace_span": (None, [c.c_int, c.c_char_p, c.c_int64, c.c_int64, c.c_int64]),
    "dray_trace_wait": (None, [c.c_int, c.c_char_p, c.c_int64]),
    "dray_trace_wait_briefly": (None, [c.c_int, c.c_char_p, c.c_int64]),
    "dray_trace_waited_for": (None, [c.c_int]),
    "dray_trace_worked": (None, [c.c_int64, c.c_int64]),
    "dray_transport_find": (CODE, [c.c_char_p, c.c_char_p, c.c_size_t]),
    "dray_update_finish": (CODE, [c.c_void_p, c.POINTER(UpdateReport)]),
    "dray_update_poll": (CODE, [c.c_void_p]),
    "dray_update_report_json": (CODE, [c.POINTER(UpdateReport), c.c_char_p, c.c_size_t]),
    "dray_update_start": (CODE, [c.c_void_p, c.POINTER(UpdateOptions)]),
    "dray_update_weights": (CODE, [c.c_void_p, c.POINTER(UpdateOptions), c.POINTER(UpdateReport)]),
    "dray_version": (c.c_char_p, []),
}
