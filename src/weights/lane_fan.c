/* The lane of pinned memory whose bytes ranks on several GPUs want (fan.h): this rank's share is
 * uploaded in rounds, and what others upload is taken from their GPUs as soon as it is there. Never
 * waits; what it could wait for is another process, whose end, silence or refusal makes this rank
 * upload the rest itself. */
#include "base/clock.h"
#include "base/error.h"
#include "weights/compile.h"
#include "weights/fan.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define PATIENCE_NS (3 * DRAY__SECOND) /* with a member that brings nothing */
#define LOOK_NS 100000                 /* at the boards */

enum turn_state { WAITING, TAKING, INSTEAD, DONE };

/* A member of the cohort, as the lane sees it. */
struct member {
    int pidfd; /* -1: its end does not show */
    int64_t brought_ns, held_ns;
};

struct fan_lane {
    dray__haul *haul;
    dray__fan *fan;
    const dray__fan_program *made;
    const uint64_t *ops;
    uint64_t count;
    uint8_t *states; /* of turns */
    struct member *members;
    dray__program **instead; /* one for each member that failed */
    uint32_t instead_count, instead_done;
    uint32_t round, turns_done;
    bool uploading;
    int poll_fd, timer_fd;
    uint64_t taken_bytes;
    int64_t began_ns, held_ns, held_since_ns; /* nothing to do but to wait for others */
    uint32_t held_by;
};

/* ---- ends ------------------------------------------------------------------------------------ */

static const dray__source *member_of(const struct fan_lane *l, uint32_t member)
{
    return &l->haul->sources->cohort[member];
}

static void lane_close(void *lane)
{
    struct fan_lane *l = lane;
    if (!l)
        return;
    dray__fan_board_end(l->haul->options.board, l->haul->options.run);
    if (l->made)
        dray__program_stop(l->made->program);
    for (uint32_t i = 0; i < l->instead_count; i++) {
        dray__program_stop(l->instead[i]);
        dray__program_free(l->instead[i]);
    }
    for (uint32_t i = 0; l->members && i < l->haul->sources->cohort_count; i++)
        if (l->members[i].pidfd >= 0)
            close(l->members[i].pidfd);
    if (l->poll_fd >= 0)
        close(l->poll_fd);
    if (l->timer_fd >= 0)
        close(l->timer_fd);
    free(l->instead);
    free(l->members);
    free(l->states);
    free(l);
}

/* ---- opening --------------------------------------------------------------------------------- */

static int watch(const struct fan_lane *l, int fd, dray_error *error)
{
    struct epoll_event event = {.events = EPOLLIN};
    if (fd < 0 || epoll_ctl(l->poll_fd, EPOLL_CTL_ADD, fd, &event))
        return dray__fail_errno(error, errno, "descriptors of an update");
    return DRAY_OK;
}

/* Its end shows where it is of this namespace of processes. */
static void open_member(struct fan_lane *l, uint32_t index)
{
    struct member *m = &l->members[index];
    if (m->pidfd < 0)
        m->pidfd = (int)syscall(SYS_pidfd_open, (pid_t)member_of(l, index)->pid, 0);
    if (m->pidfd >= 0)
        watch(l, m->pidfd, NULL);
}

static int lane_init(struct fan_lane *l, dray_error *error)
{
    uint32_t members = l->haul->sources->cohort_count;
    l->members = calloc(members, sizeof *l->members);
    l->instead = calloc(members, sizeof(dray__program *));
    if (!l->members || !l->instead)
        return dray__nomem(error);
    for (uint32_t i = 0; i < members; i++)
        l->members[i] = (struct member){.pidfd = -1, .brought_ns = dray__now()};
    int rc = dray__fan_find(l->fan, l->haul, l->ops, l->count, &l->made, error);
    if (rc)
        return rc;
    l->states = calloc((size_t)l->made->turn_count + 1, sizeof *l->states);
    l->poll_fd = epoll_create1(EPOLL_CLOEXEC);
    l->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (!l->states)
        return dray__nomem(error);
    if (l->poll_fd < 0)
        return dray__fail_errno(error, errno, "descriptors of an update");
    rc = watch(l, l->timer_fd, error);
    if (rc == DRAY_OK)
        rc = watch(l, l->made->program->poll_fd, error);
    for (uint32_t i = 0; i < l->made->turn_count; i++)
        open_member(l, l->made->turns[i].member);
    return rc;
}

static int lane_open(dray__haul *haul, const uint64_t *ops, uint64_t count, uint64_t ceiling,
                     void **out, dray_error *error)
{
    (void)ceiling;
    struct fan_lane *l = calloc(1, sizeof *l);
    if (!l)
        return dray__nomem(error);
    l->haul = haul;
    l->fan = haul->sources->fan;
    l->ops = ops;
    l->count = count;
    l->poll_fd = l->timer_fd = -1;
    int rc = lane_init(l, error);
    if (rc) {
        lane_close(l);
        return rc;
    }
    if (l->made->covers)
        dray__fan_board_begin(haul->options.board, haul->options.run);
    else
        dray__fan_board_end(haul->options.board, haul->options.run);
    l->began_ns = dray__now();
    *out = l;
    return DRAY_OK;
}

/* ---- this rank's share ----------------------------------------------------------------------- */

static void enter(const struct fan_lane *l, const dray__program *program, uint32_t step)
{
    if (l->haul->options.verify)
        dray__program_enter(l->haul, program, step);
}

/* The rounds follow each other: all at once, none would be there before the last. The GPU goes from
 * one to the next by itself, and looks at what came while the next one comes. */
static int start_rounds(struct fan_lane *l, dray_error *error)
{
    int rc = dray__program_start(l->made->program, 0, error);
    for (uint32_t r = 1; r < DRAY__FAN_ROUNDS && rc == DRAY_OK; r++)
        rc = dray__program_follow(l->made->program, r, r - 1, error);
    l->uploading = true;
    return rc;
}

static int upload(struct fan_lane *l, dray_error *error)
{
    const dray__program *p = l->made->program;
    int rc = l->uploading ? DRAY_OK : start_rounds(l, error);
    if (rc)
        return rc;
    while (l->round < DRAY__FAN_ROUNDS) {
        rc = dray__program_poll(p, l->round, error);
        if (rc)
            return rc == DRAY_EAGAIN ? DRAY_OK : rc;
        enter(l, p, l->round);
        if (l->made->covers)
            dray__fan_board_enter(l->haul->options.board, l->round);
        l->round++;
    }
    return DRAY_OK;
}

/* ---- the others' ----------------------------------------------------------------------------- */

static const dray_region *board_of(const dray__source *member)
{
    return member->regions[dray_layout_region_count(member->layout)];
}

static bool has_ended(const struct member *m)
{
    struct pollfd p = {.fd = m->pidfd, .events = POLLIN};
    return m->pidfd >= 0 && poll(&p, 1, 0) > 0;
}

/* What is still to be taken from a member is uploaded here. */
static int give_up(struct fan_lane *l, uint32_t member, dray_error *error)
{
    uint32_t most = l->haul->sources->cohort_count * DRAY__FAN_ROUNDS;
    bool *instead = calloc(most, sizeof *instead);
    dray__program *p = NULL;
    int rc = instead ? DRAY_OK : dray__nomem(error);
    for (uint32_t i = 0; i < l->made->turn_count && rc == DRAY_OK; i++) {
        const dray__fan_turn *turn = &l->made->turns[i];
        if (turn->member != member || l->states[i] != WAITING)
            continue;
        instead[dray__fan_turn_of(turn->member, turn->round)] = true;
        l->states[i] = INSTEAD;
        l->turns_done++;
    }
    if (rc == DRAY_OK)
        rc = dray__fan_instead(l->fan, l->haul, l->ops, l->count, instead, &p, error);
    free(instead);
    if (rc)
        return rc;
    l->instead[l->instead_count++] = p;
    rc = watch(l, p->poll_fd, error);
    return rc ? rc : dray__program_start(p, 0, error);
}

/* Those that are in time: what this rank still has to do itself is none of their fault. */
static bool is_late(const struct fan_lane *l, const struct member *m, int64_t now)
{
    return l->round == DRAY__FAN_ROUNDS && now - m->brought_ns > PATIENCE_NS;
}

static int look_at(struct fan_lane *l, uint32_t index, int64_t now, dray_error *error)
{
    const dray__fan_turn *turn = &l->made->turns[index];
    struct member *m = &l->members[turn->member];
    if (l->states[index] == TAKING) {
        int rc = dray__program_poll(l->made->program, turn->step, error);
        if (rc)
            return rc == DRAY_EAGAIN ? DRAY_OK : rc;
        enter(l, l->made->program, turn->step);
        l->states[index] = DONE;
        l->turns_done++;
        l->taken_bytes += turn->bytes;
        return DRAY_OK;
    }
    enum dray__fan_news news =
        dray__fan_look(board_of(member_of(l, turn->member)), l->haul->options.run, turn->round);
    if (news == DRAY__FAN_HERE) {
        m->brought_ns = now;
        l->states[index] = TAKING;
        return dray__program_start(l->made->program, turn->step, error);
    }
    if (l->round < DRAY__FAN_ROUNDS)
        m->brought_ns = now;
    return news == DRAY__FAN_GIVEN_UP || is_late(l, m, now) || has_ended(m)
               ? give_up(l, turn->member, error)
               : DRAY_OK;
}

static int take(struct fan_lane *l, int64_t now, dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < l->made->turn_count && rc == DRAY_OK; i++)
        if (l->states[i] == WAITING || l->states[i] == TAKING)
            rc = look_at(l, i, now, error);
    for (uint32_t i = l->instead_done; i < l->instead_count && rc == DRAY_OK; i++) {
        rc = dray__program_poll(l->instead[i], 0, error);
        if (rc)
            return rc == DRAY_EAGAIN ? DRAY_OK : rc;
        enter(l, l->instead[i], 0);
        l->instead_done++;
    }
    return rc;
}

/* ---- stepping -------------------------------------------------------------------------------- */

/* While nothing is under way but what others have to do. */
static void note_waiting(struct fan_lane *l, int64_t now)
{
    bool waits = l->round == DRAY__FAN_ROUNDS && l->instead_done == l->instead_count;
    uint32_t whom = UINT32_MAX;
    for (uint32_t i = 0; i < l->made->turn_count && waits; i++) {
        waits = l->states[i] != TAKING;
        if (l->states[i] == WAITING)
            whom = l->made->turns[i].member;
    }
    waits = waits && whom != UINT32_MAX;
    if (l->held_since_ns) {
        l->held_ns += now - l->held_since_ns;
        l->members[l->held_by].held_ns += now - l->held_since_ns;
    }
    l->held_since_ns = waits ? now : 0;
    if (waits)
        l->held_by = whom;
}

static void set_timer(const struct fan_lane *l)
{
    struct itimerspec spec = {.it_value.tv_nsec = LOOK_NS};
    uint64_t times;
    if (read(l->timer_fd, &times, sizeof times) < 0 && errno != EAGAIN)
        return;
    timerfd_settime(l->timer_fd, 0, &spec, NULL);
}

static int lane_step(void *lane, int64_t until_ns, bool *waits, dray_error *error)
{
    struct fan_lane *l = lane;
    (void)until_ns;
    int rc = upload(l, error);
    if (rc == DRAY_OK)
        rc = take(l, dray__now(), error);
    if (rc) {
        dray__fan_board_end(l->haul->options.board, l->haul->options.run);
        return rc;
    }
    note_waiting(l, dray__now());
    if (l->round < DRAY__FAN_ROUNDS || l->turns_done < l->made->turn_count ||
        l->instead_done < l->instead_count) {
        set_timer(l);
        *waits = true;
        return DRAY_EAGAIN;
    }
    l->haul->move_ns += dray__now() - l->began_ns;
    l->haul->bytes += l->made->program->bytes;
    return DRAY_OK;
}

static int lane_fd(const void *lane)
{
    const struct fan_lane *l = lane;
    return l->poll_fd;
}

static uint64_t lane_held_bytes(const void *lane)
{
    (void)lane;
    return 0;
}

static void lane_report(const void *lane, dray_update_report *report)
{
    const struct fan_lane *l = lane;
    uint32_t longest = 0;
    report->fanned_bytes += l->taken_bytes;
    if (l->held_ns <= report->held_ns)
        return;
    for (uint32_t i = 1; i < l->haul->sources->cohort_count; i++)
        if (l->members[i].held_ns > l->members[longest].held_ns)
            longest = i;
    report->held_ns = l->held_ns;
    snprintf(report->held_by, sizeof report->held_by, "%.100s", member_of(l, longest)->name);
}

static void lane_explain(const void *lane, dray_error *error)
{
    const struct fan_lane *l = lane;
    for (uint32_t i = 0; i < l->made->turn_count; i++)
        if (l->states[i] == WAITING) {
            dray__fail_prefix(error, error->code, "%s has not uploaded its share: ",
                              member_of(l, l->made->turns[i].member)->name);
            return;
        }
}

const dray__lane_kind dray__lane_fan = {.name = "fan",
                                        .takes = dray__fan_takes,
                                        .open = lane_open,
                                        .step = lane_step,
                                        .fd = lane_fd,
                                        .report = lane_report,
                                        .held_bytes = lane_held_bytes,
                                        .explain = lane_explain,
                                        .close = lane_close};
