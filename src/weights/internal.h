/* src/weights/: the two ends of an update of weights, publishers and subscribers, and the parts
 * between them. The files of this folder itself are those that both ends share: which elements of a
 * member's blocks count (pieces.c), slices of rectangles (slices.c), regions of callers, lists of
 * handles, and tables of checksums. Each folder within it is one subject; docs/architecture.md
 * lists them in the order in which they may include each other. */

/* The structures and functions that the files of src/weights share. */
#pragma once

#include "base/arena.h"
#include "base/hook.h"
#include "base/options.h"
#include "control/channel.h"
#include "plan/rects.h"
#include "weights/sums.h"

#include <dray/weights.h>
#include <stdbool.h>

struct dray__delta_view; /* weights/delta/delta.h */
struct dray__staging;    /* weights/server/arena.h */

/* Copies and checksums go in pieces that stay in a core's own cache between the two. */
#define DRAY__SLICE_BYTES ((uint64_t)256 << 10)
#define DRAY__FILE_SLICE_BYTES ((uint64_t)1 << 20)

/* ---- local.c: the members of this process, for readers here and for its data server ---------- */
typedef struct dray__local dray__local;
struct dray__shares; /* shares.h */
struct dray__event;
/* Layout, regions, delta and arena (NULL: there is none) are borrowed until dray__local_remove.
 * count: the layout's regions come first, others may follow. */
int dray__local_add(uint64_t token, const dray_layout *layout, dray_region *const *regions,
                    uint32_t count, const struct dray__delta_view *delta,
                    struct dray__staging *arena, dray_error *error);
/* Sets the event after which the published bytes are in memory; borrowed as well. NULL when they
 * are there at once. */
void dray__local_set_mark(uint64_t token, struct dray__event *mark);
struct dray__event *dray__local_mark(const dray__local *local);
/* Removes the member. Waits until it is not held any more. */
void dray__local_remove(uint64_t token);
/* Holds a member, which cannot be closed until it is released. Returns NULL when this process has
 * no such member (any more). */
dray__local *dray__local_hold(uint64_t token);
/* Does the same for a reader's ticket. Fails with DRAY_EDEAD when dray__local_hold returns NULL. */
int dray__local_hold_ticket(uint64_t token, dray__local **out, dray_error *error);
void dray__local_release(dray__local *local);
dray_region *dray__local_region(const dray__local *local, uint32_t index);
const struct dray__delta_view *dray__local_delta(const dray__local *local);
struct dray__staging *dray__local_arena(const dray__local *local);
const dray_layout *dray__local_layout(const dray__local *local);
/* Sets the list of rectangles that the member's update has received. From now on only members of
 * its cohort may read the member, and only these rectangles. With NULL the memory is about to
 * change, and nothing may be read; the call waits until no reader is left. Takes over the
 * shares. */
void dray__local_share(uint64_t token, struct dray__shares *shares);
/* Notes that the run has begun, so that readers of its rectangles need not wait for that. */
void dray__local_began(uint64_t token, uint64_t run);
bool dray__local_has_begun(const dray__local *local, uint64_t run);
struct dray__shares *dray__local_shares(const dray__local *local); /* NULL when there are none */
/* Ends the reading of updates older than `attempt`, because the memory may change. */
void dray__local_revoke(uint64_t token, uint64_t attempt);
/* Notes that the memory of a held member is registered for one-sided reads (exports.h), which end
 * when it is revoked. */
void dray__local_export(dray__local *local);
/* Fails with DRAY_ESTALE when the attempt was revoked. */
int dray__local_check(const dray__local *local, uint64_t attempt, dray_error *error);
/* A reader of the member's memory that reads between its calls, too, because a GPU copies. When
 * this attempt is revoked, `stop` is called from another thread. It ends the reading, and returns
 * when nothing is read any more. It must not call functions of local.c. */
typedef struct dray__guest {
    struct dray__guest *next;
    dray__local *of; /* NULL when it is not registered (any more) */
    uint64_t attempt;
    void (*stop)(void *user);
    void *user;
} dray__guest;
/* Registers a reader of a held member. */
void dray__local_enter(dray__local *local, dray__guest *guest);
void dray__local_depart(dray__guest *guest); /* also after `stop` */
uint64_t dray__local_token(void);            /* a new token */

/* ---- pieces.c: which elements of a member's blocks count ------------------------------------- */
typedef struct dray__piece {
    dray__rect rect;
    uint32_t block;
    bool owned; /* no earlier member, and no earlier block of this one, holds it */
} dray__piece;

typedef struct dray__pieces {
    dray__piece *items; /* block by block; together they are exactly the blocks */
    uint32_t *first;    /* of each block; one more entry than blocks */
    uint32_t count;
    uint64_t capacity;
} dray__pieces;

typedef struct dray__holder {
    const dray_layout *layout;
    const char *const *names; /* a name for each tensor, equal names for equal tensors; NULL for the
                               * layout's own */
} dray__holder;

/* Returns the pieces of members[self]. `members` are all members in the order of their ranks. */
int dray__pieces_make(const dray__holder *members, uint32_t self, dray__pieces *out,
                      dray_error *error);
void dray__pieces_free(dray__pieces *pieces);
dray__rect dray__rect_of(const dray_layout *layout, uint32_t block);

/* ---- slices.c: a rectangle in slices of bounded size */
typedef struct dray__slicer {
    dray__rect whole;
    int64_t tile[DRAY_MAX_DIMS], at[DRAY_MAX_DIMS];
    bool done;
} dray__slicer;

/* Slices have at most `limit` bytes, but at least one element. */
void dray__slicer_start(dray__slicer *slicer, const dray__rect *whole, uint64_t element_bytes,
                        uint64_t limit);
/* Starts the slices of a copy, in a shape that suits its mover. */
void dray__slicer_start_copy(dray__slicer *slicer, const dray_copy *copy, uint64_t limit);
bool dray__slicer_peek(const dray__slicer *slicer, dray__rect *out);
void dray__slicer_next(dray__slicer *slicer);
dray__rect dray__copy_rect(const dray_copy *copy);
/* Makes the copy read its elements from a block of its tensor, which holds all of them. */
void dray__copy_from_block(dray_copy *copy, const dray_layout *layout, uint32_t block);
/* Return true when the copy reads, or fills, this part of the block. Two blocks may hold the same
 * elements. */
bool dray__copy_reads(const dray_copy *copy, const dray_block *block, const dray__rect *part);
bool dray__copy_fills(const dray_copy *copy, const dray_block *block, const dray__rect *part);
/* Returns the part of a copy in rect, which must be within the copy. */
dray_copy dray__copy_cut(const dray_copy *copy, const dray__rect *rect);
/* Returns the copy from the dense place to which `in` moves the elements, to their destination. */
dray_copy dray__copy_onwards(const dray_copy *copy, const dray_copy *in);
/* Makes the destination dense, C order, at `offset` of region 0. Returns its bytes. */
uint64_t dray__copy_to_dense(dray_copy *copy, int32_t dtype, uint64_t offset);
/* Does the same within a larger rectangle that is dense. */
uint64_t dray__copy_to_box(dray_copy *copy, const dray__rect *box, int32_t dtype, uint64_t offset);
/* Makes the source dense in the same way. */
void dray__copy_from_box(dray_copy *copy, const dray__rect *box, int32_t dtype, uint64_t offset);

/* Iterates over the blocks of a tensor that hold parts of a rectangle. */
typedef struct dray__blocks {
    const dray_block *block;
    uint32_t index;
    dray__rect cross; /* the part of the rectangle that the block holds */
    bool all;         /* that part is the whole rectangle */
    const dray_layout *layout;
    const dray_block *next;
    dray__rect rect;
} dray__blocks;
dray__blocks dray__blocks_of(const dray_layout *layout, uint32_t tensor, const dray__rect *rect);
bool dray__blocks_next(dray__blocks *blocks); /* returns false after the last one */

uint64_t dray__tensor_elements(const dray_tensor_info *tensor);
/* Returns true when both have the same dtype and shape. */
bool dray__tensor_like(const dray_tensor_info *a, const dray_tensor_info *b);

/* Cells are elements that share a scale; `cell` counts them in each dimension. */
dray__rect dray__transform_rect(const dray_transform *transform);
/* Returns the cells that a rectangle of elements touches. */
dray__rect dray__cells_touched(const int64_t *cell, const dray__rect *rect);
/* Gives the cells that are entirely in the rectangle; a cell that is cut off at the end of `whole`
 * counts as well. Returns false when there are none. */
bool dray__cells_inside(const int64_t *cell, const dray__rect *whole, const dray__rect *rect,
                        dray__rect *out);
/* Returns the elements of cells, cut off at the end of `whole`. */
dray__rect dray__cells_elements(const int64_t *cell, const dray__rect *whole,
                                const dray__rect *cells);

/* ---- checksums.c */
struct dray_checksums {
    dray__sums sums;
};
/* Computes the sum of a rectangle of a block. *scratch: memory for parts of files, made when it is
 * first needed, which the caller frees. */
int dray__sum_rect(const dray_layout *layout, dray_region *const *regions, uint32_t block,
                   const dray__rect *rect, dray_region **scratch, uint64_t *sum, dray_error *error);
/* Adds the owned pieces' sums by tensor name. */
int dray__sum_pieces(const dray_layout *layout, dray_region *const *regions,
                     const dray__pieces *pieces, dray__sums *out, dray_error *error);

/* ---- checkpoint.c */
/* Plans between two layouts of this process, and carries the plan out. */
int dray__copy_all(const dray_layout *from, dray_region *const *sources, const char *name,
                   const dray_layout *to, dray_region *const *destinations, dray_error *error);

/* ---- manifest.c: the sums of a checkpoint's tensors in the metadata of its files */
#define DRAY__SUMS_KEY "dray.sums"
/* Adds the sums in all files of a layout; files may have none. Returns 0, or DRAY_EFORMAT when they
 * are malformed, or not of exactly the file's tensors. */
int dray__stored_sums(const dray_layout *files, dray__sums *out, dray_error *error);
/* Parses a sum of 16 hexadecimal digits. Returns false for any other text, and for NULL. */
bool dray__sum_parse(const char *text, uint64_t *out);
/* Compares the sums in the files with those that were found. DRAY_ECHECKSUM names the first file
 * and tensor that differ. */
int dray__stored_compare(const dray_layout *files, const dray__sums *stored,
                         const dray__sums *found, dray_error *error);
/* Returns, for each tensor, the text of its sum in a file's header, with zeros in place of the sum,
 * which is known only when the bytes are written. NULL for tensors without elements. */
char **dray__values_later(const dray_layout *layout);
/* Puts the sums into the headers of the files, over such zeros. */
int dray__values_set(const dray_layout *files, const dray__sums *sums, dray_error *error);
void dray__values_free(char **values, const dray_layout *layout);

/* ---- regions.c */
/* Opens the files of a layout. Returns NULL with the error in *rc on failure. */
dray_region **dray__files_open(const dray_layout *files, int writable, int *rc, dray_error *error);
void dray__files_close(dray_region **opened, const dray_layout *files); /* NULL is fine */
/* Waits until everything that was written to the files is on the disk. */
int dray__files_sync(dray_region *const *opened, const dray_layout *files, dray_error *error);
/* Returns true for a kind that other processes of this host can map. */
bool dray__region_offered(const dray_region *region);
/* Offers a region to other processes, by its entry's key. Fails with DRAY_EUNSUPPORTED for a kind
 * that other processes cannot map, and when its GPU's driver does not export the memory. */
int dray__region_put(dray__channel *channel, const dray_context *context, uint64_t key,
                     uint32_t index, const dray_region *region, const uint8_t *event,
                     int64_t deadline_ns, dray_error *error);
/* Returns the packed handle by which another process maps the region. Fails as above. */
enum { DRAY__HANDLE_PACKED = 1024 };
int dray__region_handle(const dray_region *region, uint64_t member, uint64_t epoch,
                        const uint8_t *event, uint8_t out[DRAY__HANDLE_PACKED], dray_error *error);
/* Returns the copy of block `index` between two memories of the same layout. */
dray_copy dray__block_copy(const dray_layout *layout, uint32_t index);
/* Makes the same layout in regions of another kind, or, if regions is not NULL, of their kinds. */
int dray__layout_in(const dray_layout *layout, dray_region_kind kind, dray_region *const *regions,
                    dray_layout **out, dray_error *error);
/* Checks that the regions fit the layout: number, kinds and sizes. */
int dray__regions_check(const dray_layout *layout, dray_region *const *regions, dray_error *error);
/* Checks that no two blocks have the same bytes where regions have memory in common. The planner
 * sees only blocks of one region. DRAY_EOVERLAP names them. */
int dray__regions_apart(const dray_plan_member *destination, dray_region *const *regions,
                        dray_error *error);

/* Copies the caller's layout, with the GPUs of its regions (regions may be NULL). Appends the
 * packed form to `packed`, which may be NULL. */
int dray__layout_copy(const dray_layout *layout, dray_region *const *regions, dray_layout **out,
                      dray__writer *packed, dray_error *error);
/* Returns the GPU of a member with this layout, for the planner; 0 when it has none. */
uint64_t dray__layout_device(const dray_layout *layout);
dray_region **dray__regions_copy(const dray_layout *layout, dray_region *const *regions);

/* ---- sources.c: the sources of an update, kept between updates ------------------------------- */
typedef struct dray__op {
    dray_copy copy;
    uint32_t block;    /* of the destination */
    bool owned;        /* counts in the group's sums */
    bool scales;       /* reads the scales of a transform */
    bool prequantised; /* of a transform: whole cells, which the source can quantise
                          (prequantised.h) */
    /* 1 + the index of the plan's transform of which the copy is a read; such a copy has no
     * destination. 0 when there is none. */
    uint32_t transform;
} dray__op;

/* `kept` is state that lasts from one update to the next; each item belongs to the file that made
 * it (base/arena.h). */
typedef struct dray__source {
    uint64_t member, host, token;
    int64_t pid;
    char *name, *endpoint; /* of its data server; "" when it has none */
    dray_layout *layout;
    dray_region **regions; /* entries are NULL when not imported, or when `local` has them */
    bool local, mapped;    /* mapped: this process can map its shared regions */
    bool staged;           /* regions that are not shared are read through its arena */
    uint64_t slot_bytes;   /* of that arena; 0 when it has none */
    bool has_delta;        /* behind the layout's regions it has one that holds a delta */
    bool has_progress;     /* it has one with its progress (upload.h): an engine's rank on a GPU */
    struct dray__event *mark; /* the event after which the published bytes are there; NULL when they
                               * are */
    const dray_region *arena; /* the last of `regions`; NULL when not imported */
    dray__kept *kept;
} dray__source;

typedef struct dray__sources {
    uint64_t source_set;              /* 0 for a checkpoint on disk */
    uint64_t group_set, host;         /* host: of the destination */
    struct dray__cuda_device *device; /* the destination's GPU, or NULL */
    dray__source *sources;
    uint32_t count;
    dray_plan *plan;
    dray__op *ops; /* in the plan's order */
    uint64_t op_count;
    uint64_t *transform_ops; /* the first op of each transform, and the end */
    uint32_t *write_blocks;  /* the destination block of each of the plan's writes */
    const char **names;      /* for each destination tensor: the source's name of it */
    bool casts, files;
    dray__kept *kept;     /* state of all sources together; freed before the regions */
    dray__sums stored;    /* the sums in a checkpoint's files; may be empty */
    bool imported, ready; /* ready: the cohort is imported, too */
    /* The ranks that update to the same version at the same time, with this rank. They may change
     * while the plan stays. */
    uint64_t cohort_set;
    dray__source *cohort;
    uint32_t cohort_wanted, cohort_count;
    /* while it is being made */
    uint32_t wanted;     /* sources; `count` are fetched */
    dray__source *group; /* the group's other ranks, until the plan is made */
    uint32_t group_count;
    uint16_t asked;                      /* the request without an answer yet; 0 when there is
                                          * none */
    uint64_t next_op;                    /* the op whose region is imported next */
    uint32_t next_extra;                 /* then the source whose delta and arena are imported */
    uint32_t next_member;                /* then the cohort member whose regions are imported */
    bool cohort_looked;                  /* the uploads of the cohort are divided */
    uint32_t asked_source, asked_region; /* the arguments of the REGION_GET */
    bool asked_member;                   /* that source is a member of the cohort */
} dray__sources;

typedef struct dray__destination {
    dray_layout *layout;
    dray_region **regions;
    uint64_t member, host, token;
    uint32_t rank, world;
    dray_region *progress; /* tells others which rounds it has uploaded (upload.h); NULL when there
                            * is none */
} dray__destination;

/* Makes publishers' memory the source. The coordinator has given the set and the number of ranks.
 */
int dray__sources_live(uint64_t source_set, uint32_t source_count, uint64_t group_set,
                       const dray__destination *destination, dray__sources **out,
                       dray_error *error);
/* Makes a checkpoint the source. */
int dray__sources_disk(const char *path, uint64_t group_set, const dray__destination *destination,
                       dray__sources **out, dray_error *error);
/* Makes the staging the source: regions like the destination's, followed by DRAY__EXTRA_REGIONS
 * empty places. They are taken over on success. The result is planned and imported. */
enum { DRAY__EXTRA_REGIONS = 2 };
int dray__sources_staged(const dray__destination *destination, dray_region **staging,
                         dray__sources **out, dray_error *error);
/* Fetches the layouts of both sets that are missing, then plans. Returns DRAY_EAGAIN until the
 * request that it has started is answered. Does nothing once the plan is there. */
int dray__sources_plan(dray__sources *sources, dray__channel *channel, uint64_t key,
                       const dray__destination *destination, dray_error *error);
/* ops.c: plans, and makes the ops, once the layouts of both sets are there. */
int dray__sources_prepare(dray__sources *sources, const dray__destination *destination,
                          dray_error *error);
/* Returns these ops sorted by tensor, else in their order; NULL when out of memory. */
uint64_t *dray__ops_by_tensor(const dray__sources *sources, const uint64_t *ops, uint64_t count);
/* Makes the regions that the plan reads reachable, in the same way. */
int dray__sources_import(dray__sources *sources, dray__channel *channel, uint64_t key,
                         dray_error *error);
/* Reads the sums in the checkpoint's files. */
int dray__sources_disk_sums(dray__sources *sources, dray_error *error);
/* Returns true when the checkpoint's files are the same as when the plan was made. */
bool dray__sources_disk_same(const dray__sources *sources, const char *path);
/* local.c: holds the sources that are members of this process (dray__local_hold), each at its
 * number of `held`. The caller releases them, also when this fails. Returns 0, or DRAY_EDEAD when
 * one closed. */
int dray__sources_hold(const dray__sources *sources, dray__local **held, dray_error *error);
void dray__sources_release(const dray__sources *sources, dray__local **held);
/* regions.c: is this region reached through its member's data server, rather than mapped? */
bool dray__source_remote(const dray__source *source, uint32_t region, uint64_t host);
/* remote_nccl.c: returns true when so many bytes are enough for the slots of NCCL from so many
 * publishers. With fewer, data servers send the bytes themselves. */
bool dray__nccl_has_room(uint64_t ceiling, uint32_t sources);
/* Sets the cohort that updates together with this rank, to be fetched with the plan. set is 0 for
 * none. */
int dray__sources_cohort(dray__sources *sources, uint64_t set, uint32_t count, dray_error *error);
/* Forgets the imported regions: the next import makes them again. */
void dray__sources_close(dray__sources *sources);
void dray__sources_free(dray__sources *sources);

/* Fetches the first `count` members of a set, and waits for them. On failure, the members with a
 * layout were fetched. */
int dray__members_fetch(dray__channel *channel, uint64_t key, uint64_t set, dray__source *sources,
                        uint32_t count, int64_t deadline_ns, dray_error *error);
void dray__source_clear(dray__source *source);

/* ---- transfer.c: carries out the copies by routes (transfer.h), and sums the moved bytes ---- */
typedef struct dray__transfer dray__transfer;

typedef struct dray__transfer_options {
    struct dray__load *load; /* NULL for the destination's own memory. Borrowed until close. */
    int32_t strategy;
    uint64_t bucket_bytes, nccl_bytes; /* nccl_bytes 0: nothing comes over NCCL */
    bool verify;
    bool once;             /* the sources' ops are used by this transfer only */
    uint32_t ctas;         /* thread blocks of kernels; 0 means the number that moves fastest */
    int32_t copy_engines;  /* 1: copy engines move everything that they can; 0: if it is faster */
    int64_t within_ns;     /* the time over which moves are spread; 0 means as fast as possible */
    uint64_t attempt;      /* the attempt in requests to publishers' data servers */
    uint64_t run;          /* the run in requests to members of the cohort; 0 without a cohort */
    dray_region *progress; /* tells the cohort which rounds are uploaded; NULL when not needed */
    const struct dray__stream_keys *keys; /* for these connections; borrowed, also after close */
    /* [destination tensor]: the coordinator will compare it as a whole with the publishers' sums.
     * NULL for no tensor. Borrowed until close. */
    const bool *compared;
    /* [destination block]: it is in place already, and is not moved. NULL for no block. Borrowed
     * until close. */
    const bool *in_place;
    /* The version that this rank holds as a whole, of the incarnation that it reads, is `base`: a
     * delta on it can be applied. */
    bool has_base;
    uint64_t incarnation, base, version;
    /* This rank holds the checkpoint on which the checkpoint that it reads is a delta. */
    bool has_disk_base;
} dray__transfer_options;

#define DRAY__NO_COPY_ENGINES (-1)
#define DRAY__LEASE_DEFAULT (5 * DRAY__SECOND)
#define DRAY__BUCKET_MIN ((uint64_t)128 << 10)
#define DRAY__LOAD_MIN ((uint64_t)512 << 10)
#define DRAY__BUCKET_DEFAULT ((uint64_t)64 << 20)
#define DRAY__WITHIN_MAX 3600 /* seconds */
#define DRAY__NCCL_MIN ((uint64_t)1 << 20)
#define DRAY__NCCL_DEFAULT ((uint64_t)1 << 30)

/* Sources and destination are borrowed until close. */
int dray__transfer_open(dray__sources *sources, const dray__destination *destination,
                        const dray__transfer_options *options, dray__transfer **out,
                        dray_error *error);
/* Works for about budget_ns. Returns DRAY_EAGAIN when more is left. */
int dray__transfer_step(dray__transfer *transfer, int64_t budget_ns, dray_error *error);
/* Returns true when, after a step, nothing can be done until dray__transfer_fd is readable. */
bool dray__transfer_waits(const dray__transfer *transfer);
/* Adds to an error at the deadline which member the update was waiting for. */
void dray__transfer_explain(const dray__transfer *transfer, dray_error *error);
/* Returns true when it uploads bytes for other ranks, too (upload.h). */
bool dray__transfer_uploads(const dray__transfer *transfer);
int dray__transfer_fd(const dray__transfer *transfer); /* level-triggered; -1: never waits */
/* Compares the expected sum of each destination block with the sum that was found. Fails with
 * DRAY_ECHECKSUM. */
int dray__transfer_check(const dray__transfer *transfer, dray_error *error);
/* Compares the sums that were found with these, one for each destination block. NULL compares
 * nothing. */
int dray__transfer_compare(const dray__transfer *transfer, const uint64_t *sums, dray_error *error);
/* Returns the sums of the source's bits that this rank owns within its group. */
int dray__transfer_sums(const dray__transfer *transfer, dray__sums *out, dray_error *error);
/* Returns the sums of the destination's bits in the blocks that this rank owns, by its own names
 * and dtypes. *as_read: they equal the sums that it read, and *out is empty. Fails with
 * DRAY_EUNSUPPORTED when a block is owned in part, or nothing was verified. */
int dray__transfer_resident(const dray__transfer *transfer, bool *as_read, dray__sums *out,
                            dray_error *error);
/* Returns one sum for each destination block, which the caller frees. NULL without verification. */
uint64_t *dray__transfer_take_blocks(dray__transfer *transfer);
#define DRAY__REPORT_FIRST dray__end_of(dray_update_report, planned)
void dray__transfer_report(const dray__transfer *transfer, dray_update_report *report);
void dray__transfer_close(dray__transfer *transfer);
