/* subscriber.h - a rank of an engine takes versions of weights, together with the other ranks of
 * its group. An update has the steps plan (cached), prepare, move, verify, and commit. One thread
 * uses a subscriber at a time, but for dray_subscriber_note_step. Since 0.1. */
#ifndef DRAY_SUBSCRIBER_H
#define DRAY_SUBSCRIBER_H

#include <dray/load.h>
#include <dray/memory.h>
#include <dray/plan.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dray_subscriber dray_subscriber;

typedef struct dray_subscriber_options {
    size_t size;
    dray_region *const *regions; /* live regions, in the layout's order; borrowed until close */
    const char *group;           /* name of the engine, whose ranks commit together */
    uint32_t rank, world;        /* in the group */
    int64_t timeout_ns;          /* 0: the context's */
    /* Not NULL: the engine gets whole tensors through the callback load->load (load.h). The layout
     * then says which tensors it takes, in which dtype and order, as dray_layout_full or a
     * checkpoint's layout does; its blocks and `regions` are ignored, and aliases are left out.
     * dray_update_poll, or the call that waits, calls load->load bucket by bucket; strategy and
     * bucket_bytes of the update are ignored. Verification and commit are as for other engines.
     * Borrowed for the call. */
    const dray_load_options *load;
    /* Where prefetched weights of regions on GPUs are kept. 0: in spare memory of the same GPU.
     * DRAY_REGION_PINNED: in pinned host memory; the commit then copies over PCIe. */
    int32_t staging;
} dray_subscriber_options;

#define DRAY_SUBSCRIBER_OPTIONS_INIT                                                               \
    {                                                                                              \
        sizeof(dray_subscriber_options), NULL, NULL, 0, 1, 0, NULL, 0                              \
    }

/* Registers this rank's blocks as the destination of updates. Regions must be memory. The layout is
 * copied; the caller closes *out. Does not wait for the other ranks. DRAY_EEXIST: a living member
 * has this rank. DRAY_EINVALID: the group has another world size. DRAY_EFULL: a tensor, or tensors
 * that must arrive together, are larger than the load options' bucket. */
int dray_subscriber_open(dray_context *context, const char *model, const dray_layout *layout,
                         const dray_subscriber_options *options, dray_subscriber **out,
                         dray_error *error);
/* Ends the registration, and an update in progress. A group that loses a rank is torn, because it
 * lacks that rank's part of the version. NULL is fine. */
void dray_subscriber_close(dray_subscriber *subscriber);

/* The source of an update. All ranks of a group must ask for the same one, and all with
 * verification or all without. */
typedef enum dray_update_mode {
    DRAY_MODE_AUTO = 0,    /* TENSOR, else DISTRIBUTED, else DISK where a path is given */
    DRAY_MODE_TENSOR,      /* publishers' memory on this host */
    DRAY_MODE_DISTRIBUTED, /* sources on other hosts through their data servers; on this host as
                              TENSOR */
    DRAY_MODE_DISK         /* a checkpoint; needs no publisher */
} dray_update_mode;

typedef enum dray_update_strategy {
    DRAY_STRATEGY_DIRECT = 0, /* from the source's memory into the engine's */
    DRAY_STRATEGY_BUCKET,     /* through a bucket of at most bucket_bytes */
    DRAY_STRATEGY_PARAMETER   /* through a bucket that holds one parameter at a time */
} dray_update_strategy;

typedef struct dray_update_options {
    size_t size;
    int32_t mode;          /* dray_update_mode */
    int32_t strategy;      /* dray_update_strategy */
    uint64_t min_version;  /* waits for a version >= this and takes the newest */
    const char *path;      /* DISK: checkpoint folder or file */
    uint64_t path_version; /* DISK: the version that the checkpoint holds */
    uint64_t bucket_bytes; /* most staging memory, >= 128 KiB; 0 means 64 MiB */
    int32_t no_verify;     /* 1: checksums of the written memory are not compared */
    int64_t timeout_ns;    /* for the whole update; 0 means the subscriber's */
    /* How long the update waits for other engines that read this engine's memory before it
     * overwrites the memory; their updates then fail. 0: 5 s */
    int64_t lease_ns;
    int32_t no_peers; /* 1: does not read from other engines of this host */
    /* Most thread blocks (of 256 threads) that the update's kernels have at once, for updates
     * beside inference on the same GPU; 0: as many as are useful. */
    uint32_t ctas;
    /* 1: copy engines move runs of 64 KiB and more that need no conversion, so that kernels do
     * little more than verify. */
    int32_t copy_engines;
    /* Most GPU memory, beside bucket_bytes, for tensors that come over NCCL. The publishers' GPUs
     * need as many bytes together. Kept from one update to the next. >= 1 MiB; 0 means 1 GiB. */
    uint64_t nccl_bytes;
    /* Of dray_prefetch_weights: how long it may take. Copies between GPUs are then made in small
     * pieces that are spread over this time, so that inference beside it has the memory and the
     * links nearly to itself. A prefetch that is late moves at full rate from then on, and ends as
     * soon as it can. 0: as fast as it can; at most 3600. */
    double prefetch_seconds;
} dray_update_options;

#define DRAY_UPDATE_OPTIONS_INIT                                                                   \
    {                                                                                              \
        sizeof(dray_update_options), 0, 0, 0, NULL, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0                   \
    }

/* The source that an update has read. */
typedef enum dray_update_source {
    DRAY_SOURCE_PUBLISHERS = 0,
    DRAY_SOURCE_PEERS,  /* another engine that held the version */
    DRAY_SOURCE_DISK,   /* a checkpoint */
    DRAY_SOURCE_STAGING /* dray_commit_weights: the prefetched weights */
} dray_update_source;

typedef struct dray_update_report {
    size_t size;
    uint64_t version, incarnation;
    int32_t mode, strategy;
    uint64_t bytes, source_bytes;
    uint64_t link_bytes[DRAY_LINK_COUNT];
    uint64_t copies;
    int64_t wait_ns; /* time until the version was published */
    int64_t plan_ns, prepare_ns, move_ns, verify_ns, commit_ns,
        total_ns;              /* total_ns has no wait_ns */
    double bytes_per_s;        /* moved bytes over move_ns */
    uint64_t peak_extra_bytes; /* most staging memory at a time */
    uint32_t retries;
    int32_t planned; /* 1: a new plan was made; 0: it was cached */
    /* The tensors that the group compared end to end: checksums of the tensors as its ranks read
     * them with those that were announced, or that the checkpoint carries. Tensors that the group
     * holds in part are not compared. 0: verification was off on one side. Bytes are those that
     * were published. */
    uint64_t verified_tensors, verified_bytes;
    /* How many of `bytes` were not copied because a delta covers them, and how many bytes of deltas
     * were read instead. */
    uint64_t delta_covered_bytes, delta_bytes;
    /* Bytes sent and received over connections to other hosts, NCCL's included: data, requests and
     * checksums. */
    uint64_t wire_bytes;
    int32_t source; /* dray_update_source */
    /* How many of `bytes` another rank on a GPU of this host had uploaded from pinned memory; this
     * rank copied them from that GPU, so that they crossed PCIe once. */
    uint64_t fanned_bytes;
    /* The longest time that this rank or its GPU only waited for another member, and that member's
     * name, with its GPU where there are several; "": it did not wait. */
    int64_t held_ns;
    char held_by[128];
    int64_t device_ns; /* part of move_ns that GPUs took by their own clocks; of each step the
                          slowest GPU */
    /* How much the update slowed the engine down, of the steps that dray_subscriber_note_step
     * reported: how many steps ran during the move, their average time, and the time of a step
     * without an update (the median of the last 64). 0: nothing was reported. */
    uint64_t steps;
    int64_t step_ns, step_before_ns;
    uint64_t nccl_bytes; /* part of wire_bytes that NCCL moved */
    /* The time that the engine could not run: of an update from the moment when its memory may
     * change to the group's decision, of a commit all of the call up to that; of a prefetch 0. */
    int64_t pause_ns;
    uint64_t exchanged_bytes; /* part of `bytes` that a commit did not copy: it exchanged memory */
    /* Spare memory for prefetches, also as part of peak_extra_bytes; and the part of it that no
     * block of this engine needs, because memory is exchanged in whole chunks. */
    uint64_t spare_bytes, spare_waste_bytes;
} dray_update_report;

#define DRAY_UPDATE_REPORT_INIT                                                                    \
    {                                                                                              \
        sizeof(dray_update_report), 0, 0, 0, 0, 0, 0, {0}, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  \
            0, 0, 0, 0, 0, 0, 0, {0}, 0, 0, 0, 0, 0, 0, 0, 0, 0                                    \
    }

/* Writes the report as one line of JSON, without newline but terminated, to `out` of `capacity`
 * bytes; 4,096 are enough. DRAY_EFULL: capacity is too small. */
int dray_update_report_json(const dray_update_report *report, char *out, size_t capacity,
                            dray_error *error);

/* Updates the engine's memory: moves, verifies and commits a version, together with the other ranks
 * of the group. Afterwards all ranks hold the new version, or all keep the old one, or, where bytes
 * were overwritten already, the group is torn until a later update succeeds. options NULL: the
 * defaults. report may be NULL; its size is set by the caller, and it is filled on success. Blocks
 * up to the deadline and one second more for the answer. DRAY_ETORN: the group is torn; the message
 * has the reason. After any other error nothing was written. DRAY_ETIMEDOUT: there is no version,
 * or ranks are missing; the message names them. DRAY_EDEAD: a rank of the group or of the publisher
 * died. DRAY_ESTALE: dray_publisher_wait dropped this group. DRAY_ESHAPE, DRAY_EHOLE, DRAY_EDTYPE:
 * the source cannot fill the layout. DRAY_EUNSUPPORTED: the source cannot be reached. */
int dray_update_weights(dray_subscriber *subscriber, const dray_update_options *options,
                        dray_update_report *report, dray_error *error);

/* The same without blocking. dray_update_start begins an update; DRAY_EBUSY: another one is in
 * progress. dray_update_poll works for about 2 ms at most and returns DRAY_EAGAIN until the update
 * has ended. dray_update_finish then returns its result and the report. dray_subscriber_fd is a
 * level-triggered descriptor that is readable when poll has work to do, during the move always. */
int dray_update_start(dray_subscriber *subscriber, const dray_update_options *options,
                      dray_error *error);
int dray_update_poll(dray_subscriber *subscriber, dray_error *error);
int dray_update_finish(dray_subscriber *subscriber, dray_update_report *report, dray_error *error);
int dray_subscriber_fd(const dray_subscriber *subscriber);
/* Reports that a step of the engine, such as a decoding step, has ended and how long it took; the
 * reports of updates and prefetches then say how much they slowed the engine down. Threads: any,
 * also during an update. Does not block. */
int dray_subscriber_note_step(dray_subscriber *subscriber, int64_t took_ns, dray_error *error);

/* ---- delayed swap -------------------------------------------------------------------------------
 * A prefetch moves a version into staging memory and verifies it, while the engine goes on with the
 * version that it holds. A commit copies the prefetched version into place when the engine is
 * ready. All ranks of the group begin each of them, and it ends in the same way for all ranks, as
 * an update does. dray_update_poll, dray_update_finish and dray_subscriber_fd serve updates,
 * prefetches and commits.
 *
 * Staging is as large as the subscriber's regions. The first prefetch allocates it, later ones use
 * it again, and it counts in peak_extra_bytes. When a prefetch is complete, its source may change.
 * A prefetched version is lost when the next prefetch begins, when a rank closes, and by
 * dray_prefetch_drop. A failed prefetch leaves the engine's memory as it was. */
int dray_prefetch_start(dray_subscriber *subscriber, const dray_update_options *options,
                        dray_error *error);
int dray_prefetch_weights(dray_subscriber *subscriber, const dray_update_options *options,
                          dray_update_report *report, dray_error *error);
/* Of the options only min_version, lease_ns and timeout_ns are used. GPU memory in chunks of an
 * arena, or of dray_region_alloc, is exchanged with the prefetched one under the same addresses,
 * and not read again; nothing on the GPU may use it until the call returns. The rest is copied, and
 * the copy is verified with the checksums of the prefetch. DRAY_ENOENT: the group has no prefetched
 * version, or one that is older than min_version; other errors as of dray_update_weights. */
int dray_commit_start(dray_subscriber *subscriber, const dray_update_options *options,
                      dray_error *error);
int dray_commit_weights(dray_subscriber *subscriber, const dray_update_options *options,
                        dray_update_report *report, dray_error *error);
/* Frees this rank's staging; the group's prefetched version is lost. DRAY_EBUSY: an update is in
 * progress. Blocks for one answer. */
int dray_prefetch_drop(dray_subscriber *subscriber, dray_error *error);

typedef enum dray_group_state {
    DRAY_GROUP_EMPTY = 0, /* never updated */
    DRAY_GROUP_WHOLE,
    DRAY_GROUP_TORN
} dray_group_state;

/* Asks the coordinator for the group's state: the last committed version (0 before the first), its
 * incarnation (0: it came from disk) and the dray_group_state. Outputs may be NULL. DRAY_EAGAIN:
 * the coordinator was started again and does not know yet, because other ranks of the group have
 * not registered again; each does so with its next call. Blocks for one answer. */
int dray_subscriber_version(dray_subscriber *subscriber, uint64_t *version, uint64_t *incarnation,
                            int32_t *state, dray_error *error);
/* Unmaps memory that publishers want back (dray_publisher_release). Call it from time to time
 * between updates. Blocks for one answer. */
int dray_subscriber_release_mappings(dray_subscriber *subscriber, dray_error *error);
/* Takes an engine out of the list of those that serve (engines.h), before it ends. Then waits up to
 * timeout_ns until no other engine reads its memory. Updates that still read then fail; *revoked
 * (may be NULL) gets their number. One rank's call is enough; each rank that is about to release
 * its memory calls it, because the coordinator then gives up its handles of that rank's memory,
 * too. A later update offers the memory, and makes the engine serve, again. Blocks up to the
 * timeout and one second more. */
int dray_subscriber_leave(dray_subscriber *subscriber, int64_t timeout_ns, uint32_t *revoked,
                          dray_error *error);
/* Computes the checksums of this rank's memory and compares them with those of its last update.
 * DRAY_ECHECKSUM: they differ; the message names the first tensor and block and says how many
 * differ. DRAY_ENOENT: no update with verification was committed here. DRAY_EUNSUPPORTED: the
 * engine loads through load_weights. Reads all of the memory. */
int dray_subscriber_verify(dray_subscriber *subscriber, dray_error *error);

#ifdef __cplusplus
}
#endif
#endif
