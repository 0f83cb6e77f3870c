/* publisher.h - a trainer's rank announces versions of its weights, and waits for their readers
 * before it writes again. */
#ifndef DRAY_PUBLISHER_H
#define DRAY_PUBLISHER_H

#include <dray/memory.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dray_publisher dray_publisher;

typedef struct dray_publisher_options {
    size_t size;
    dray_region *const *regions; /* live regions, in the layout's order; borrowed until close */
    uint32_t rank, world;        /* a version is ready when all `world` ranks published it */
    int32_t no_checksums;        /* 1: none are made */
    int64_t timeout_ns;          /* 0: the context's */
    /* 1: keeps a copy of the blocks' last published bits, and tells readers that hold the version
     * before which elements changed, for as long as few did. Costs as much memory again (in files
     * none), and half as much address space. */
    int32_t delta;
    /* The dray_dtype in which deltas keep and send floats; NONE means as they are stored. Readers
     * of another dtype get whole tensors. An f32 trainer of bf16 engines sets BF16: half the
     * memory, and most small steps change nothing. */
    int32_t delta_dtype;
    /* 1: readers read a copy of the regions, which this publisher allocates: of a GPU's memory in
     * memory of that GPU, of all other memory in shared memory. dray_publisher_publish first waits
     * up to timeout_ns for readers of the previous copy, drops those that are left, and fills the
     * copy. dray_publisher_wait then returns at once. */
    int32_t snapshot;
    /* Size of a staging arena in shared memory, for weights that are in private host memory or in a
     * file. Engines on this host read them through the arena, converted where that makes them
     * smaller, and never map or open the memory or file itself. All engines share the arena; it is
     * exported once and kept until close. 128 KiB to 1 GiB; 2 MiB for each engine that reads at the
     * same time are enough. 0: no arena; then such weights go through the data server's buffers and
     * a socket, and engines open files themselves. Regions of shared memory are always read where
     * they are. */
    uint64_t staging_bytes;
} dray_publisher_options;

#define DRAY_PUBLISHER_OPTIONS_INIT                                                                \
    {                                                                                              \
        sizeof(dray_publisher_options), NULL, 0, 1, 0, 0, 0, 0, 0, 0                               \
    }

/* Registers this rank's blocks of `model`. When all `world` ranks have opened, the coordinator
 * gives them a new incarnation number. Versions of different incarnations are never mixed. The
 * layout is copied; the caller closes *out. Does not wait for the other ranks. DRAY_EEXIST: a
 * living member has this rank. */
int dray_publisher_open(dray_context *context, const char *model, const dray_layout *layout,
                        const dray_publisher_options *options, dray_publisher **out,
                        dray_error *error);
/* Announces that this rank's blocks hold `version`. Readers begin at once, while the checksums of
 * the memory are computed beside them: on GPUs those of GPU and pinned memory, in a thread of the
 * library those of other memory. No group commits the version before the checksums of all ranks are
 * there and equal those that the group has read. The memory must not change until
 * dray_publisher_wait, which waits for the checksums too, returns for this version. version: any
 * number, 0 included, that is greater than those before it in this incarnation. Publishing a
 * version withdraws the older ones. ready: a fence after the last write; NULL: the memory is host
 * memory and written already. For GPU memory that only this host reads, without deltas, the call
 * does not wait for the fence; readers and checksums do. Else it waits for the fence. The call
 * blocks for one answer, while it looks for changes (deltas) or copies (snapshot), and until the
 * checksums of the version before are complete; the first call also waits until all `world` ranks
 * have opened. All of it takes at most the publisher's timeout, after which the checksums are given
 * up as well: the version is withdrawn then, its readers' updates fail, and the publisher's next
 * call returns DRAY_ETIMEDOUT. It never waits for readers. DRAY_EINVALID: the version is not
 * greater. DRAY_ETIMEDOUT: the version was not announced and may be published again, or the
 * coordinator did not answer and may have announced it, or the checksums of the version before came
 * too late; the message tells these apart. DRAY_ESTALE: another rank died or closed; close this
 * publisher and open it again. */
int dray_publisher_publish(dray_publisher *publisher, uint64_t version, const dray_fence *ready,
                           dray_error *error);
/* Waits until subscriber groups have committed `version`, or a newer one of this incarnation, in
 * any mode but from disk. A group counts also when it has closed since. groups: names of `count`
 * groups, which need not be open yet; NULL: any `count` groups. The call withdraws nothing, so that
 * a late group still finds the version. dray_publisher_wait withdraws a version that no group has
 * begun to read; therefore all ranks call dray_publisher_deliver first. DRAY_ETIMEDOUT: the message
 * names the missing groups and the versions that they hold; the version stays published.
 * DRAY_EINVALID: this rank did not publish it. DRAY_ESTALE: another rank died or closed. Blocks up
 * to the timeout and one second more for the answer, also while the coordinator is started again.
 */
int dray_publisher_deliver(dray_publisher *publisher, uint64_t version, const char *const *groups,
                           uint32_t count, int64_t timeout_ns, dray_error *error);
/* Withdraws `version` and waits until its checksums are complete, and until every subscriber group
 * that reads it, or an older one, has finished. Call it before the memory is written again. Groups
 * that come later wait for the next version. Groups that have not finished at the timeout are
 * dropped: their epoch grows, their commit is refused, and those that had begun to write are torn.
 * The call returns 0 then as well; *dropped (may be NULL) gets their number, and the log has their
 * names. DRAY_EINVALID: this rank did not publish the version. Blocks. */
int dray_publisher_wait(dray_publisher *publisher, uint64_t version, int64_t timeout_ns,
                        uint32_t *dropped, dray_error *error);
/* The same for a stream of the GPU that has the memory, without blocking: work that is put into the
 * stream after the call, such as an optimizer's step, begins when the readers have finished or were
 * dropped. A thread of the library waits; the publisher's next call waits for that thread and
 * returns its error. The stream continues in any case. stream: a CUstream; NULL: the default
 * stream. DRAY_EUNSUPPORTED: the memory is not on a GPU, or the driver does not let streams wait
 * for memory. */
int dray_publisher_wait_stream(dray_publisher *publisher, uint64_t version, void *stream,
                               int64_t timeout_ns, dray_error *error);
/* Replaces the publisher's regions, after the memory behind the layout was offloaded and loaded, or
 * reallocated. The blocks have the same offsets in the new regions. Withdraws published versions;
 * readers make a new plan at their next update. Call it after dray_publisher_wait or
 * dray_publisher_release and before the next dray_publisher_publish, which refuses regions whose
 * memory was freed (DRAY_ESTALE). regions: in the layout's order, borrowed until close or the next
 * move. DRAY_EUNSUPPORTED: the publisher has deltas; other errors as of dray_publisher_open. Blocks
 * for one answer. */
int dray_publisher_move(dray_publisher *publisher, dray_region *const *regions, dray_error *error);
/* The same with a new layout: for blocks that have other offsets, or are in more or fewer regions,
 * as when PyTorch's expandable segments put parameters elsewhere. layout: of the same tensors and
 * the same elements of each, else DRAY_EINVALID; it is copied. The other ranks need not call it.
 * DRAY_EUNSUPPORTED: the publisher has deltas or a snapshot. */
int dray_publisher_set_layout(dray_publisher *publisher, const dray_layout *layout,
                              dray_region *const *regions, dray_error *error);

/* A member that has memory of this rank mapped. */
typedef struct dray_pin {
    uint64_t member, bytes;
    char name[112];
} dray_pin;

/* Takes published memory back before it is freed. No reader is given it any more; groups that read
 * it are waited for, and dropped at the timeout. Engines unmap it in
 * dray_subscriber_release_mappings, at their next update, or when they close. Returns 0 when no
 * other process has the memory mapped: it can be freed. DRAY_ETIMEDOUT: *count members still had it
 * mapped; `pins` gets the first `capacity` of them, and the log all. They keep their mapping. After
 * either result dray_publisher_move must come before the next dray_publisher_publish. A snapshot is
 * freed; dray_publisher_move allocates it again. Blocks up to the timeout. */
int dray_publisher_release(dray_publisher *publisher, int64_t timeout_ns, dray_pin *pins,
                           uint32_t capacity, uint32_t *count, dray_error *error);
/* Ends the incarnation: updates in progress fail, its versions are gone, and the other ranks must
 * open again. Waits some milliseconds for readers in this process. NULL is fine. */
void dray_publisher_close(dray_publisher *publisher);

#ifdef __cplusplus
}
#endif
#endif
