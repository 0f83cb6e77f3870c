/* weights.h - publishers (trainer ranks) and subscribers (engine ranks). An update is
 * session -> plan (cached) -> prepare -> move -> verify -> commit. */
#ifndef DRAY_WEIGHTS_H
#define DRAY_WEIGHTS_H

#include <dray/dray.h>
#include <dray/memory.h>
#include <dray/model.h>
#include <dray/plan.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dray_publisher dray_publisher;
typedef struct dray_subscriber dray_subscriber;

typedef struct dray_publisher_options {
    size_t size;
    dray_region *const *regions; /* live regions, in the layout's order; borrowed until close */
    uint32_t rank, world;        /* a version is ready when all `world` ranks published it */
    int32_t checksum;            /* 0: on (default); -1: off */
    int64_t timeout_ns;          /* 0: the context's */
    /* 1: keeps a copy of the blocks' last published bits, and tells readers that hold the version
     * before which elements changed, for as long as few did. Costs as much memory again (in files
     * none), and half as much address space. */
    int32_t delta;
    /* dray_dtype in which floats are kept and sent by deltas; NONE: as they are stored. Readers of
     * another dtype get them whole. An f32 trainer of bf16 engines says BF16: half the memory, and
     * most small steps change nothing. */
    int32_t delta_dtype;
    /* 1: readers read a copy in shared memory, as large as the regions and allocated here; publish
     * fills it, after it waited for the readers of the copy before (at most timeout_ns, then they
     * are dropped), and dray_publisher_wait returns at once: the trainer goes on. */
    int32_t snapshot;
    /* Of a staging arena in shared memory, for weights that lie offloaded in private host memory or
     * in a file: engines on this host get them through its slots, converted on the way where that
     * makes them smaller, and never map or open the store itself. Exported once and kept until
     * close, also over dray_publisher_move. It is all that both sides hold on the way; all engines
     * that read at once share it. 0: none (then such weights go through the data server's own
     * buffers and a socket, and files are opened by the engine); else 128 KiB to 1 GiB, 2 MiB for
     * each engine that reads at the same time are enough. Regions that are shared already are read
     * where they are. */
    uint64_t staging_bytes;
} dray_publisher_options;

#define DRAY_PUBLISHER_OPTIONS_INIT                                                                \
    {                                                                                              \
        sizeof(dray_publisher_options), NULL, 0, 1, 0, 0, 0, 0, 0, 0                               \
    }

/* Registers this rank's blocks of `model`. When all `world` ranks of one generation have opened,
 * the coordinator gives the gang a publisher incarnation; versions of an older incarnation are
 * never mixed with its own. Does not wait for the other ranks. DRAY_EEXIST: the rank is taken by a
 * living member. */
int dray_publisher_open(dray_context *context, const char *model, const dray_layout *layout,
                        const dray_publisher_options *options, dray_publisher **out,
                        dray_error *error);
/* "My blocks hold `version`": computes this rank's checksums (after the fence), then announces.
 * Versions are any numbers, 0 included, that grow within an incarnation (DRAY_EINVALID); publishing
 * one withdraws the older ones. The memory must not change until dray_publisher_wait returns for
 * this version. ready NULL: host memory, written already. Blocks while it reads its memory (without
 * checksums it does not, and does not wait for the fence of memory on GPUs that this host alone
 * reads: readers do), the first call also until all `world` ranks have opened (at most the
 * publisher's timeout); never waits for readers. DRAY_ETIMEDOUT: the version was not announced, and
 * may be published again, or, as the message says then, the coordinator did not answer and may have
 * announced it. DRAY_ESTALE: a rank of the gang died or closed; close this publisher and open it
 * again. */
int dray_publisher_publish(dray_publisher *publisher, uint64_t version, const dray_fence *ready,
                           dray_error *error);
/* Until the engines have it: waits until so many subscriber groups have committed `version`, or a
 * newer one of this incarnation, in any way but from disk; what a group has committed counts also
 * when it is gone since. groups: their names, `count` of them, which need not be open yet; NULL:
 * any groups. Withdraws nothing, so that a group that comes late finds the version:
 * dray_publisher_wait does, which would have a version taken back that no group has begun to read.
 * So all ranks of the gang call this first, then that. At the deadline DRAY_ETIMEDOUT names the
 * groups that are missing and what they hold; the version stays published. DRAY_EINVALID: this rank
 * did not publish it; DRAY_ESTALE: a rank of the gang died or closed. Threads: as all calls of a
 * publisher, one at a time. Blocks, also over a coordinator that is started anew, up to the timeout
 * (and a second more for the answer). */
int dray_publisher_deliver(dray_publisher *publisher, uint64_t version, const char *const *groups,
                           uint32_t count, int64_t timeout_ns, dray_error *error);
/* Before the next write: waits until every subscriber group that reads `version` (or an older one)
 * released it. Also withdraws the version, as soon as one rank calls it: later readers wait for the
 * next one. Groups that do not release it within the timeout are dropped: their epoch advances,
 * their commit will be refused, those that had begun to write are torn. DRAY_OK is returned then,
 * too; *dropped (may be NULL) gets how many they were, the log their names. DRAY_EINVALID: this
 * rank did not publish it. */
int dray_publisher_wait(dray_publisher *publisher, uint64_t version, int64_t timeout_ns,
                        uint32_t *dropped, dray_error *error);
/* The same for a stream of the GPU that has the memory: what is put into it from now on begins when
 * the readers have released the version, or were dropped at the timeout; the caller goes on at once
 * (an optimizer's step can be enqueued behind it). A thread waits; the publisher's next call waits
 * for that first, and returns what it failed with: the stream goes on in any case. stream: a
 * CUstream (NULL: the default one). DRAY_EUNSUPPORTED: memory that lies on no GPU, or a driver that
 * lets no stream wait for memory. */
int dray_publisher_wait_stream(dray_publisher *publisher, uint64_t version, void *stream,
                               int64_t timeout_ns, dray_error *error);
/* The memory behind the layout is elsewhere now (offloaded and loaded, reallocated, wrapped anew):
 * says all regions again, in the layout's order; the blocks lie in them as before. Exported anew,
 * and planned anew by readers at their next update; what was published is withdrawn. Call it
 * between dray_publisher_wait, or dray_publisher_release, and the next dray_publisher_publish,
 * which refuses regions that were freed (DRAY_ESTALE). regions: borrowed until close or the next
 * move. DRAY_EUNSUPPORTED: a publisher with deltas; else as dray_publisher_open. Asks the
 * coordinator. */
int dray_publisher_move(dray_publisher *publisher, dray_region *const *regions, dray_error *error);
/* The same where the blocks, too, lie otherwise in their regions than before, or in more or fewer
 * of them, as when an allocator of pieces (PyTorch's expandable segments) puts parameters
 * elsewhere. layout: of the same tensors, and the same elements of each (DRAY_EINVALID: not);
 * copied. Each rank for itself: the others need not move. DRAY_EUNSUPPORTED: a publisher with
 * deltas or a snapshot. */
int dray_publisher_relay(dray_publisher *publisher, const dray_layout *layout,
                         dray_region *const *regions, dray_error *error);

/* A member that has memory of this rank mapped. */
typedef struct dray_pin {
    uint64_t member, bytes;
    char name[112];
} dray_pin;

/* Before memory that was published is freed: takes it back. Nobody is given it any more, groups
 * that read it are waited for and then dropped, engines unmap it (in dray_subscriber_attend, at
 * their next update, when they close or die). DRAY_OK: nobody has it mapped, free it.
 * DRAY_ETIMEDOUT: at the deadline *count members had: the first `capacity` of them are in pins, all
 * in the log; what the kernel keeps for them is theirs. Either way dray_publisher_move must come
 * before the next publish; a snapshot is freed, and allocated again by it. */
int dray_publisher_release(dray_publisher *publisher, int64_t timeout_ns, dray_pin *pins,
                           uint32_t capacity, uint32_t *count, dray_error *error);
/* 0 until the first dray_publisher_publish. */
uint64_t dray_publisher_incarnation(const dray_publisher *publisher);
/* Ends the gang: readers in progress fail, its versions are gone, the other ranks must open again.
 * Waits for readers of this process to finish a slice (milliseconds). NULL is fine. */
void dray_publisher_close(dray_publisher *publisher);

/* ---- load_weights: engines that cannot tell their layout ----------------------------------------
 * Such an engine gets full named tensors, bucket by bucket, through a callback, and cuts out what
 * it wants itself. */

/* One tensor of a bucket, or a slice of its rows. */
typedef struct dray_load_tensor {
    const char *name;
    int32_t dtype;
    uint32_t ndim;
    int64_t shape[DRAY_MAX_DIMS]; /* of the whole tensor */
    int64_t first_row, rows;      /* along dimension 0: all of it, but in slices; a scalar: 0, 1 */
    uint64_t start, end;          /* bytes from the bucket's start; dense, C order */
    uint64_t numel;               /* of what is here: end - start in elements */
} dray_load_tensor;

typedef struct dray_load_bucket {
    size_t size;
    uint64_t version;
    const void *data; /* each tensor aligned to 64 bytes, padding between them is anything; an
                         address of a GPU where the options asked for its memory */
    uint64_t bytes;
    const dray_load_tensor *tensors;
    uint32_t count;
    uint32_t index, buckets; /* of this update: the last one has index buckets - 1 */
} dray_load_bucket;

/* The engine's load_weights. bucket and all that it points to are borrowed for the call: copies
 * out of it must be complete when it returns. Not 0: the update fails with this DRAY_E... code and
 * what was put into *error; from the first bucket on the group is torn then. Must not use the
 * subscriber. */
typedef int (*dray_load_fn)(void *user, const dray_load_bucket *bucket, dray_error *error);

typedef struct dray_load_options {
    size_t size;
    dray_load_fn load;
    void *user;
    uint64_t
        bucket_bytes; /* ceiling of all memory that an update holds here, >= 512 KiB; 0: 64 MiB */
    int32_t slices; /* 1: a tensor that no bucket holds comes in slices of rows, in order; 0: it is
                       DRAY_EFULL at open, with what it takes */
    /* Tensors that must arrive in one call: each entry names parts, "a,b", and tensors whose names
     * are the same up to ".a." or ".b." come together. NULL: "q_a_proj,kv_a_proj_with_mqa", which
     * engines fuse. An empty list (count 0): none must. Borrowed for the call. */
    const char *const *together;
    uint32_t together_count;
    /* Where buckets lie: 0: host memory; DRAY_REGION_CUDA: memory of the GPU whose context is
     * current in the thread that updates, else of the first; data is a device address then, and
     * complete. */
    int32_t memory;
} dray_load_options;

#define DRAY_LOAD_OPTIONS_INIT                                                                     \
    {                                                                                              \
        sizeof(dray_load_options), NULL, NULL, 0, 0, NULL, 0, 0                                    \
    }

typedef struct dray_subscriber_options {
    size_t size;
    dray_region *const *regions; /* live regions, in the layout's order; borrowed until close */
    const char *group;           /* the engine: its ranks commit together */
    uint32_t rank, world;        /* within the group */
    int64_t timeout_ns;          /* 0: the context's */
    /* Not NULL: the layout says only which tensors this engine takes, in which dtype and order (as
     * of dray_layout_full or of a checkpoint); its blocks and `regions` are not looked at, aliases
     * are left out. Each update then hands all of them to load->load, from dray_update_poll or the
     * call that waits, bucket by bucket; its strategy and bucket_bytes say nothing. What was handed
     * over is verified and committed with the group like everything else. Borrowed for the call. */
    const dray_load_options *load;
    /* Where what is prefetched lies beside regions on GPUs: 0: spare memory of the same GPU;
     * DRAY_REGION_PINNED: pinned host memory, from which a commit takes as long as PCIe does. */
    int32_t staging;
} dray_subscriber_options;

#define DRAY_SUBSCRIBER_OPTIONS_INIT                                                               \
    {                                                                                              \
        sizeof(dray_subscriber_options), NULL, NULL, 0, 1, 0, NULL, 0                              \
    }

/* Registers this rank's blocks as a destination. Regions must be addressable. Does not wait for the
 * other ranks. DRAY_EEXIST: the rank is taken by a living member; DRAY_EINVALID: the group has
 * another world size; DRAY_EFULL: a tensor, or what must arrive together, is larger than the load
 * options' bucket. */
int dray_subscriber_open(dray_context *context, const char *model, const dray_layout *layout,
                         const dray_subscriber_options *options, dray_subscriber **out,
                         dray_error *error);
/* Gives up an update in progress. A group that loses a rank is torn: the rank took its part of the
 * version along. NULL is fine. */
void dray_subscriber_close(dray_subscriber *subscriber);

/* Which source. All ranks of a group must ask for the same one, with verification or without. */
typedef enum dray_update_mode {
    DRAY_MODE_AUTO =
        0,            /* TENSOR on this host; else DISTRIBUTED; else DISK, where a path is given */
    DRAY_MODE_TENSOR, /* publishers' memory on this host */
    DRAY_MODE_DISTRIBUTED, /* sources on other hosts by their data servers, others as TENSOR */
    DRAY_MODE_DISK         /* a checkpoint; needs no publisher */
} dray_update_mode;

typedef enum dray_update_strategy {
    DRAY_STRATEGY_DIRECT = 0, /* source memory straight into final memory */
    DRAY_STRATEGY_BUCKET,     /* through <= bucket_bytes of staging */
    DRAY_STRATEGY_PARAMETER   /* a bucket that holds one parameter at a time */
} dray_update_strategy;

typedef struct dray_update_options {
    size_t size;
    int32_t mode;          /* dray_update_mode */
    int32_t strategy;      /* dray_update_strategy */
    uint64_t min_version;  /* wait for a version >= this; the newest is taken */
    const char *path;      /* DISK: checkpoint folder or file */
    uint64_t path_version; /* DISK: the version that the checkpoint holds */
    uint64_t bucket_bytes; /* ceiling of staging memory, >= 128 KiB; 0: 64 MiB */
    int32_t verify;        /* 0: on (default); -1: off */
    int64_t timeout_ns;    /* for the whole update; 0: the subscriber's */
    /* How long other engines that read this one's memory may hold up its overwrite; then their
     * updates are given up. 0: 5 s */
    int64_t lease_ns;
    int32_t peers; /* 0: other engines of this host that hold the version may be read; -1: not */
    int32_t unused;
    /* Beside inference on the same GPU: its kernels have at most so many thread blocks (of 256
     * threads) at once; 0: as many as pay. */
    uint32_t ctas;
    /* 1: copy engines move what they can (runs of 64 KiB and more that stay as they are), so that
     * kernels do little but look at what was written. */
    int32_t copy_engines;
} dray_update_options;

#define DRAY_UPDATE_OPTIONS_INIT                                                                   \
    {                                                                                              \
        sizeof(dray_update_options), 0, 0, 0, NULL, 0, 0, 0, 0, 0, 0, 0, 0, 0                      \
    }

/* Who was read. */
typedef enum dray_update_source {
    DRAY_SOURCE_PUBLISHERS = 0,
    DRAY_SOURCE_PEERS,  /* an engine that held the version */
    DRAY_SOURCE_DISK,   /* a checkpoint */
    DRAY_SOURCE_STAGING /* dray_commit_weights: what was prefetched */
} dray_update_source;

typedef struct dray_update_report {
    size_t size;
    uint64_t version, incarnation;
    int32_t mode, strategy;
    uint64_t bytes, source_bytes;
    uint64_t link_bytes[DRAY_LINK_COUNT];
    uint64_t copies;
    int64_t wait_ns; /* for the version to be there */
    int64_t plan_ns, prepare_ns, move_ns, verify_ns, commit_ns, total_ns; /* total without wait */
    double bytes_per_s;        /* moved bytes over move_ns */
    uint64_t peak_extra_bytes; /* staging held at most */
    uint32_t retries;
    int32_t planned; /* 1: the plan was made anew; 0: cached */
    /* Of the group: compared end to end, what its ranks read with what was announced (or with what
     * the checkpoint says of itself). A tensor that it holds in part cannot be; 0: verification was
     * off on either side. Bytes as they were published. */
    uint64_t verified_tensors, verified_bytes;
    /* Of `bytes`, those that were not copied because a delta says what changed in them, and what
     * was read of it instead. */
    uint64_t delta_covered_bytes, delta_bytes;
    /* Sent and received over connections to other hosts, NCCL's among them: data, requests,
     * checksums. */
    uint64_t wire_bytes;
    int32_t source; /* dray_update_source */
    int32_t unused;
    /* Of `bytes`, those that another rank on a GPU of this host uploaded from pinned memory, and
     * that were taken from there: PCIe carried them once for both. */
    uint64_t fanned_bytes;
    /* How long this rank, or its GPU, had nothing to do but to wait for someone, the longest such
     * wait of the update, and for whom: a member's name, where it matters with its GPU; "": none.
     */
    int64_t held_ns;
    char held_by[128];
    int64_t device_ns; /* of move_ns, what GPUs took by their own clocks: of each step, the one that
                          took the longest */
    /* Of the engine's steps that dray_subscriber_note_step told of: how many there were beside what
     * moved, how long they took on average, and how long steps take without (the median of the last
     * 64): by how much the engine was slowed down. 0: not told. */
    uint64_t steps;
    int64_t step_ns, step_before_ns;
    uint64_t nccl_bytes; /* of wire_bytes, what NCCL brought */
} dray_update_report;

#define DRAY_UPDATE_REPORT_INIT                                                                    \
    {                                                                                              \
        .size = sizeof(dray_update_report)                                                         \
    }

/* The report as one JSON line (no newline), terminated; DRAY_EFULL when capacity is too small. */
int dray_update_report_json(const dray_update_report *report, char *out, size_t capacity,
                            dray_error *error);

/* Move, verify and commit, together with the other ranks of the group: either all ranks hold the
 * new version, or all keep the old, or - when bytes were already overwritten - the group is torn
 * (DRAY_ETORN) until the next update repairs it. What a torn group's message tells is why. Other
 * codes mean that nothing was written: DRAY_ETIMEDOUT (no version, or ranks that did not come: they
 * are named), DRAY_EDEAD (a rank on either side died), DRAY_ESTALE (dropped by the publisher's
 * wait), DRAY_ESHAPE, DRAY_EHOLE, ... (no plan), DRAY_EUNSUPPORTED (the source cannot be reached).
 * Blocks up to the deadline (and a second more for the answer). report (may be NULL) is initialised
 * by the caller and set on success. options NULL: the defaults. */
int dray_update_weights(dray_subscriber *subscriber, const dray_update_options *options,
                        dray_update_report *report, dray_error *error);
int dray_update_weights_from_tensor(dray_subscriber *subscriber, const dray_update_options *options,
                                    dray_update_report *report, dray_error *error);
int dray_update_weights_from_distributed(dray_subscriber *subscriber,
                                         const dray_update_options *options,
                                         dray_update_report *report, dray_error *error);
int dray_update_weights_from_disk(dray_subscriber *subscriber, const dray_update_options *options,
                                  dray_update_report *report, dray_error *error);

/* The same, not blocking. start begins; poll does work in short slices (at most about 2 ms of
 * copying a call) and returns DRAY_EAGAIN until the outcome is there; finish gives the outcome.
 * dray_subscriber_fd is level-triggered: readable when poll has something to do; during move it is
 * always readable. One update at a time (DRAY_EBUSY). */
int dray_update_start(dray_subscriber *subscriber, const dray_update_options *options,
                      dray_error *error);
int dray_update_poll(dray_subscriber *subscriber, dray_error *error);
int dray_update_finish(dray_subscriber *subscriber, dray_update_report *report, dray_error *error);
int dray_subscriber_fd(const dray_subscriber *subscriber);
/* A step of the engine's own (of decoding) has ended, and took so long: so that reports of updates
 * and prefetches say by how much they slowed it down. Threads: any, also while an update goes on.
 * Does not block. */
int dray_subscriber_note_step(dray_subscriber *subscriber, int64_t took_ns, dray_error *error);

/* ---- delayed swap -------------------------------------------------------------------------------
 * A prefetch moves and verifies a version into staging (host memory, cut to this rank's layout),
 * while the engine goes on with the version that it holds; a commit copies it into place at the
 * engine's own boundary. Each is begun by all ranks of the group, and ends for all of them in the
 * same way, as an update does; dray_update_poll, dray_update_finish and dray_subscriber_fd serve
 * the three of them.
 *
 * Staging is as large as the subscriber's regions, is allocated by the first prefetch, kept for the
 * next ones, and counted in peak_extra_bytes. When a prefetch is complete its source may change. A
 * later prefetch, from its first byte on, or dray_prefetch_drop takes the place of a prefetched
 * version; so does a rank that closes, because its part went with it. A prefetch that fails leaves
 * the engine as it was: never torn. */
int dray_prefetch_start(dray_subscriber *subscriber, const dray_update_options *options,
                        dray_error *error);
int dray_prefetch_weights(dray_subscriber *subscriber, const dray_update_options *options,
                          dray_update_report *report, dray_error *error);
/* Of the options, min_version, lease_ns and timeout_ns count. The copy is verified with the sums of
 * the prefetch. DRAY_ENOENT: the group has prefetched no version, or an older one than min_version;
 * other codes as from dray_update_weights. */
int dray_commit_start(dray_subscriber *subscriber, const dray_update_options *options,
                      dray_error *error);
int dray_commit_weights(dray_subscriber *subscriber, const dray_update_options *options,
                        dray_update_report *report, dray_error *error);
/* Frees this rank's staging, and with it what the group has prefetched. DRAY_EBUSY: an update is in
 * progress. Asks the coordinator. */
int dray_prefetch_drop(dray_subscriber *subscriber, dray_error *error);
/* What this rank has in its staging. Outputs may be NULL. DRAY_ENOENT: nothing. Does not block. */
int dray_prefetched(const dray_subscriber *subscriber, uint64_t *version, uint64_t *incarnation,
                    dray_error *error);

typedef enum dray_group_state {
    DRAY_GROUP_EMPTY = 0, /* never updated */
    DRAY_GROUP_WHOLE,
    DRAY_GROUP_TORN
} dray_group_state;

/* What the coordinator says of the group: the last committed version (0 before the first),
 * incarnation (0: from disk) and dray_group_state. Outputs may be NULL. Asks the coordinator.
 * DRAY_EAGAIN: the coordinator was started anew, and other ranks of the group have not yet come
 * back to it (each does with its next call), so that nobody knows what it holds. */
int dray_subscriber_version(dray_subscriber *subscriber, uint64_t *version, uint64_t *incarnation,
                            int32_t *state, dray_error *error);
/* Between updates, from time to time: unmaps what its publishers want back. Asks the coordinator.
 */
int dray_subscriber_attend(dray_subscriber *subscriber, dray_error *error);
/* Before an engine ends: takes it from the list of those that serve, then waits until no other
 * engine reads its memory, at most timeout_ns; the updates of those that still do are given up, and
 * *revoked (may be NULL) gets how many. One rank's call is enough. A later update enters it again.
 * Blocks up to the timeout (and a second more for the answer). */
int dray_subscriber_leave(dray_subscriber *subscriber, int64_t timeout_ns, uint32_t *revoked,
                          dray_error *error);
/* Recomputes the checksums of this rank's memory and compares them with those of its last update:
 * DRAY_ECHECKSUM names the first tensor and block that differ and how many differ in all.
 * DRAY_ENOENT: no update was committed here with verification on; DRAY_EUNSUPPORTED: what it got
 * went to load_weights. Reads all of the memory. */
int dray_subscriber_verify(dray_subscriber *subscriber, dray_error *error);

/* ---- lists of handles ---------------------------------------------------------------------------
 * What frameworks hand to update_weights_from_tensor today: per name a list of handles, one a TP
 * rank, of which rank i opens entry i (SGLang's LocalSerializedTensor), with load_format and
 * flush_cache. Who makes the list keeps the memory as it is until every rank said that it is done:
 * there are no versions here, no groups and no checksums; publishers and subscribers have them. */
typedef struct dray_tensor_list dray_tensor_list;

/* load_format: what the engine is told to do with the tensors, UTF-8 of at most 255 bytes; NULL:
 * "" (its own load_weights). flush_cache: whether its KV cache is stale then. Owner: the caller. */
int dray_tensor_list_new(const char *load_format, int32_t flush_cache, dray_tensor_list **out,
                         dray_error *error);
void dray_tensor_list_free(dray_tensor_list *list); /* NULL is fine */
/* Adds a tensor: `ranks` handles, as dray_handle_describe and the tensor's shape make them, all of
 * one dtype; fds: with each its region's descriptor (-1 where the kind has none), borrowed until
 * dray_tensor_list_pack has been called for the last time. ranks: the same for all tensors of a
 * list, from 1. DRAY_EEXIST: the name is taken; DRAY_EFORMAT, DRAY_EINVALID. */
int dray_tensor_list_add(dray_tensor_list *list, const char *name, const dray_handle *handles,
                         const int *fds, uint32_t ranks, dray_error *error);
/* Wire form: versioned, checksummed, without pickle. *out: malloc'ed, free() it. *fds: the
 * descriptors that must go along (SCM_RIGHTS, in this order), each once however many tensors lie
 * there; borrowed from the list. */
int dray_tensor_list_pack(const dray_tensor_list *list, void **out, size_t *size, const int **fds,
                          uint32_t *fd_count, dray_error *error);
/* fds: what came along, duplicated. Data from anywhere may be given: DRAY_EFORMAT, DRAY_EVERSION,
 * DRAY_ECHECKSUM, DRAY_EINVALID (descriptors that are missing). Owner: the caller. */
int dray_tensor_list_unpack(const void *data, size_t size, const int *fds, uint32_t fd_count,
                            dray_tensor_list **out, dray_error *error);
uint32_t dray_tensor_list_count(const dray_tensor_list *list);
uint32_t dray_tensor_list_ranks(const dray_tensor_list *list);          /* 0: no tensor yet */
const char *dray_tensor_list_load_format(const dray_tensor_list *list); /* "": none. Borrowed */
int32_t dray_tensor_list_flush_cache(const dray_tensor_list *list);
/* Opens entry `rank` of tensor `index`, of an unpacked list. name: borrowed from the list; handle:
 * initialised by the caller, gets shape, strides and offset; region: mapped for reading, the
 * list's: each storage is mapped once, and all are unmapped by dray_tensor_list_free. Outputs may
 * be NULL. DRAY_EINVALID: no such entry; else what dray_region_import returns. */
int dray_tensor_list_open(dray_tensor_list *list, uint32_t index, uint32_t rank, const char **name,
                          dray_handle *handle, dray_region **region, dray_error *error);
/* load_format "direct": fills those blocks of a layout whose tensors are in the list from entry
 * `rank` of each, which are full tensors; converted where dtypes differ. All others stay as they
 * are, so that a model may come in several lists. All or nothing where a name, shape or dtype does
 * not fit (DRAY_ENOENT with the nearest names, DRAY_ESHAPE, DRAY_EDTYPE). */
int dray_tensor_list_load(dray_tensor_list *list, uint32_t rank, const dray_layout *layout,
                          dray_region *const *regions, dray_error *error);

/* ---- the router's list --------------------------------------------------------------------------
 * Which engines there are, as the coordinator sees them: for whoever sends them requests. An engine
 * serves from its commit on, while all of its ranks are there; it does not while its memory is
 * being overwritten, when it is torn, when it leaves. */
typedef struct dray_engines dray_engines;

typedef struct dray_engine_info {
    size_t size;
    const char *model, *group; /* borrowed until the next poll or wait */
    uint64_t version, incarnation;
    uint64_t epoch; /* grows whenever a rank was lost or the engine was dropped */
    uint32_t ranks, world;
    int32_t state;   /* dray_group_state */
    int32_t serving; /* 1: may be sent requests */
    int32_t leaving; /* 1: dray_subscriber_leave was called */
} dray_engine_info;

#define DRAY_ENGINE_INFO_INIT                                                                      \
    {                                                                                              \
        .size = sizeof(dray_engine_info)                                                           \
    }

typedef enum dray_engine_event {
    DRAY_ENGINE_JOINED = 1, /* serves now */
    DRAY_ENGINE_LEFT,       /* served before */
    DRAY_ENGINE_UPDATED,    /* serves another version */
    DRAY_ENGINE_TORN
} dray_engine_event;

/* Called from dray_engines_poll and dray_engines_wait. engine: borrowed for the call; of one that
 * is gone, what was known last. */
typedef void (*dray_engines_fn)(void *user, dray_engine_event event,
                                const dray_engine_info *engine);

/* Watches all engines of the context's session. *out is the caller's, closed before the context.
 * One thread at a time. When the coordinator is started anew, the list goes on by itself: engines
 * that served count as serving for the lease (5 s) in which they come back to it. */
int dray_engines_open(dray_context *context, dray_engines **out, dray_error *error);
/* Takes news, if there are any: DRAY_OK, and the list is new; DRAY_EAGAIN: none. fn (may be NULL)
 * is called for what they change. The first one gives the list as it is. Does not block, but looks
 * for up to 0.1 s, each 0.2 s, for a coordinator that went away: DRAY_ECLOSED when it ended, or did
 * not come back within the context's timeout. */
int dray_engines_poll(dray_engines *engines, dray_engines_fn fn, void *user, dray_error *error);
/* The same, waiting for news: DRAY_ETIMEDOUT when there are none. */
int dray_engines_wait(dray_engines *engines, int64_t timeout_ns, dray_engines_fn fn, void *user,
                      dray_error *error);
/* Readable when dray_engines_poll, which was called before, may have news. Borrowed; the same until
 * the list is closed. */
int dray_engines_fd(dray_engines *engines);
uint32_t dray_engines_count(const dray_engines *engines);
/* out: initialised by the caller. */
int dray_engines_entry(const dray_engines *engines, uint32_t index, dray_engine_info *out,
                       dray_error *error);
void dray_engines_close(dray_engines *engines);

/* ---- checksums ----------------------------------------------------------------------------------
 * Independent of the sharding: sum(tensor) = Σ over elements A(row) · B(column) · bits mod 2^64,
 * row = flattened index over all dimensions but the last, column = index along the last, A and B
 * odd and made from the global coordinate; elements of 8 bytes count as two columns of 4. So
 * partial sums of disjoint rectangles add up to the tensor's. */
typedef struct dray_checksums dray_checksums;

/* Of the blocks of a layout (elements held twice count once), read through its regions. */
int dray_checksums_compute(const dray_layout *layout, dray_region *const *regions,
                           dray_checksums **out, dray_error *error);
/* Of a model in a running session: what its publishers announced with their newest version. */
int dray_checksums_fetch(dray_context *context, const char *model, uint64_t *version,
                         dray_checksums **out, dray_error *error);
/* What a subscriber group read when it committed the version that it holds. DRAY_ENOENT: it holds
 * none as a whole. */
int dray_checksums_fetch_group(dray_context *context, const char *model, const char *group,
                               uint64_t *version, dray_checksums **out, dray_error *error);
/* Of a checkpoint's tensors, read from its files and compared with the sums that
 * dray_checkpoint_write put into them. *compared (may be NULL) gets how many tensors had one: 0 for
 * checkpoints of other writers. DRAY_ECHECKSUM names the file and the tensor; DRAY_EFORMAT: sums
 * that are malformed or of other tensors. Reads all of the files. *out is the caller's. */
int dray_checksums_of_checkpoint(const char *path, uint32_t *compared, dray_checksums **out,
                                 dray_error *error);
uint32_t dray_checksums_count(const dray_checksums *sums);
/* Entry i: name (borrowed), dtype, elements covered, sum. */
int dray_checksums_entry(const dray_checksums *sums, uint32_t index, const char **name,
                         int32_t *dtype, uint64_t *elements, uint64_t *sum, dray_error *error);
void dray_checksums_free(dray_checksums *sums);

/* Called for every block that differs: its index in the layout, and in how many elements. */
typedef void (*dray_prove_fn)(void *user, uint32_t block, uint64_t elements);
/* Does this layout describe this memory? For an engine that loaded `checkpoint` (a safetensors file
 * or folder) by its own means: every block is compared, bit for bit, with what the checkpoint holds
 * there in the block's dtype. Tensors that differ were changed after loading (shuffled, fused or
 * requantised): they go through load_weights. differs: may be NULL. DRAY_ECHECKSUM names the first
 * block that differs and says how many do; DRAY_EHOLE, DRAY_ESHAPE, DRAY_EDTYPE: the checkpoint
 * cannot fill the layout; DRAY_EUNSUPPORTED: regions that are no memory. Holds 8 MiB; reads all of
 * the memory and of what the checkpoint has for it. Threads: any. Blocks. */
int dray_layout_prove(const dray_layout *layout, dray_region *const *regions,
                      const char *checkpoint, dray_prove_fn differs, void *user, dray_error *error);

/* Writes the blocks as a Hugging Face checkpoint (safetensors, index last, fsync, atomic rename). A
 * single process that holds all of the model; `config_json` is written as config.json if not NULL.
 * Each file's metadata carries the sums of its tensors ("dray.sums"), by which updates from disk
 * and dray_checksums_of_checkpoint find files that changed. */
int dray_checkpoint_write(const char *directory, const dray_layout *layout,
                          dray_region *const *regions, const char *config_json, dray_error *error);
/* Reads a checkpoint into the layout's blocks: only the ranges needed. Tensors that the layout has
 * as a whole are compared with the sums that their files carry: DRAY_ECHECKSUM names those that
 * differ.
 */
int dray_checkpoint_read(const char *directory, const dray_layout *layout,
                         dray_region *const *regions, dray_error *error);

/* The layout of a safetensors checkpoint, as dray_layout_safetensors gives it; of one that is kept
 * as what changed since another one, that of the result. Its files hold the base's bits there: what
 * they are with the changes, the calls of this header read. *base (may be NULL): the base's folder,
 * freed with dray_free; NULL: a whole checkpoint. DRAY_ENOENT, DRAY_ECHECKSUM: the base is missing,
 * or another one; it is named. */
int dray_checkpoint_layout(const char *path, dray_layout **out, char **base, dray_error *error);

/* ---- a run's checkpoints ------------------------------------------------------------------------
 * directory/step-000007/ for each version, and directory/latest, which leads to the newest. A
 * folder has its name only when it is whole and on the disk: a writer that dies leaves what was
 * there, and the next one clears up. */
/* Tensors that lie beside the model's, as the state of an optimiser does: in a folder of the
 * checkpoint, where they are a checkpoint by themselves; always whole. */
typedef struct dray_checkpoint_part {
    const char *name; /* of the folder: 1 to 63 bytes without '/', the same on all ranks */
    const dray_layout *layout;
    dray_region *const *regions;
} dray_checkpoint_part;

/* A file beside the tensors. */
typedef struct dray_checkpoint_file {
    const char *name; /* 1 to 63 bytes without '/' */
    const void *data;
    size_t bytes;
} dray_checkpoint_file;

typedef struct dray_checkpoint_options {
    size_t size;
    uint64_t version;        /* the number of the folder; one that is there already is replaced */
    uint32_t keep;           /* how many stay, the newest ones; 0: all */
    uint32_t rank, world;    /* ranks that write one checkpoint together; world 0: 1 */
    const char *name;        /* of the ranks' meetings at the coordinator; NULL: "checkpoint" */
    const char *config_json; /* rank 0's, written as config.json; NULL: none */
    int64_t timeout_ns; /* how long to wait for the other ranks at each step; 0: the context's */
    /* So many versions are kept as what changed since the one before, then the next is whole again;
     * 0: all are whole; at most 64. What a delta builds on stays while it needs it. The whole
     * version is written first, then rank 0 compares it with the one before: the others wait that
     * long. */
    uint32_t deltas;
    /* What is written together with the model, and is there when the checkpoint is. Borrowed for
     * the call; of files rank 0's count, such as the cursor of a queue (dray_queue_cursor). */
    const dray_checkpoint_part *parts;
    const dray_checkpoint_file *files;
    uint32_t part_count, file_count;
    const uint64_t *stay; /* versions that stay although `keep` newer ones are there */
    uint32_t stay_count;
    uint32_t unused; /* 0 */
} dray_checkpoint_options;

#define DRAY_CHECKPOINT_OPTIONS_INIT                                                               \
    {                                                                                              \
        sizeof(dray_checkpoint_options), 0, 0, 0, 0, NULL, NULL, 0, 0, NULL, NULL, 0, 0, NULL, 0,  \
            0                                                                                      \
    }

/* Writes a version, each rank the blocks that it has (what several have is written by one), and
 * puts it in place when all of them are done. Together they must hold every element: DRAY_EHOLE.
 * context: for the ranks to meet; NULL where world is 1. The folder must be of a file system that
 * all ranks share. Regions must be memory. Returns DRAY_EINVALID (a name of a part or a file that
 * is none, is there twice, or is the model's), DRAY_EBUSY (another process writes there),
 * DRAY_ECANCELED (another rank failed: it is named), DRAY_EDEAD, DRAY_ETIMEDOUT (ranks), DRAY_ESYS
 * (the file and the tensor are named). Threads: one version of a folder at a time. Blocks for the
 * disk and the other ranks. */
int dray_checkpoint_save(dray_context *context, const char *directory, const dray_layout *layout,
                         dray_region *const *regions, const dray_checkpoint_options *options,
                         dray_error *error);
/* The newest version's folder, resolved: what was read from it stays of one version, also when a
 * newer one is written meanwhile; when it is removed, reading it fails. *path: freed with
 * dray_free. version may be NULL. DRAY_ENOENT: there is none. */
int dray_checkpoint_latest(const char *directory, uint64_t *version, char **path,
                           dray_error *error);

#ifdef __cplusplus
}
#endif
#endif
