#include "control/frame.h"

#include "base/error.h"
#include "base/hash.h"
#include "control/messages.h"

#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    AT_SIZE = 16, /* offset in the header */
    AT_SUM = 24,
    READ_AHEAD = 16 << 10, /* smallest space offered to recvmsg */
    KEEP = 1 << 20         /* a buffer larger than this is freed when it is empty */
};

const dray__fields dray__frame_header_fields =
    DRAY__FIELDS(dray__frame_header,
                 DRAY__NUMBERS(dray__frame_header, magic, type, fd_count, id, size, flags, sum));

/* Writes a header. Every message has one, so it is copied as a whole if its form in memory is that
 * on the wire. */
static void put_header(dray__writer *out, const dray__frame_header *header)
{
    _Static_assert(sizeof *header == DRAY__FRAME_HEADER, "it has no gaps");
    if (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__)
        dray__put_bytes(out, header, sizeof *header);
    else
        dray__put_fields(out, &dray__frame_header_fields, header);
}

static dray__frame_header get_header(const uint8_t at[DRAY__FRAME_HEADER])
{
    dray__frame_header header;
    dray__reader r = dray__reader_of(at, sizeof header);
    if (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__)
        memcpy(&header, at, sizeof header);
    else
        dray__get_fields(&r, NULL, &dray__frame_header_fields, &header);
    return header;
}

static uint32_t payload_size(const uint8_t *header)
{
    dray__reader r = dray__reader_of(header + AT_SIZE, sizeof(uint32_t));
    return dray__get_u32(&r);
}

int dray__frame_put(dray__writer *out, const dray__frame *frame, dray_error *error)
{
    if (frame->size > DRAY__FRAME_MAX)
        return dray__fail(error, DRAY_EINVALID, "message %s: %u bytes, at most %u expected",
                          dray__message_name(frame->type), frame->size, DRAY__FRAME_MAX);
    if (frame->fd_count > DRAY__FRAME_FDS)
        return dray__fail(error, DRAY_EINVALID, "message %s: %u descriptors, at most %u expected",
                          dray__message_name(frame->type), frame->fd_count, DRAY__FRAME_FDS);
    size_t start = out->size;
    const dray__frame_header header = {.magic = DRAY__FRAME_MAGIC,
                                       .type = frame->type,
                                       .fd_count = frame->fd_count,
                                       .id = frame->id,
                                       .size = frame->size,
                                       .flags = frame->flags};
    put_header(out, &header);
    dray__put_bytes(out, frame->payload, frame->size);
    if (out->failed)
        return dray__nomem(error);
    uint64_t sum = htole64(dray__hash(out->data + start, DRAY__FRAME_HEADER + frame->size));
    memcpy(out->data + start + AT_SUM, &sum, sizeof sum);
    return DRAY_OK;
}

void dray__frame_put_error(dray__writer *payload, const dray_error *error)
{
    const dray__error_told told = {error->code, error->origin, error->raw, error->message,
                                   strlen(error->message)};
    dray__put_fields(payload, &dray__error_told_fields, &told);
}

void dray__frame_get_error(dray__reader payload, dray_error *error)
{
    dray__error_told told;
    dray__get_fields(&payload, NULL, &dray__error_told_fields, &told);
    if (payload.failed || told.code >= 0) {
        dray__fail(error, DRAY_EPROTO, "malformed error reply");
        return;
    }
    int length = told.size < DRAY_ERROR_MESSAGE_MAX ? (int)told.size : DRAY_ERROR_MESSAGE_MAX - 1;
    dray__fail(error, told.code, "%.*s", length, (const char *)told.message);
    error->origin = told.origin;
    error->raw = told.raw;
}

ssize_t dray__frame_send(int socket, const uint8_t *data, size_t size, const int *fds,
                         uint32_t fd_count)
{
    union {
        char bytes[CMSG_SPACE(sizeof(int) * DRAY__FRAME_FDS)];
        struct cmsghdr align;
    } control;
    struct iovec part = {.iov_base = (void *)data, .iov_len = size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd_count) {
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
        memset(control.bytes, 0, message.msg_controllen);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
        memcpy(CMSG_DATA(header), fds, sizeof(int) * fd_count);
    }
    ssize_t n;
    do
        n = fd_count ? sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT)
                     : send(socket, data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    return n < 0 ? -errno : n;
}

ssize_t dray__link_send(int socket, dray__tls *tls, const uint8_t *data, size_t size,
                        const int *fds, uint32_t fd_count)
{
    return tls ? dray__tls_send(tls, data, size)
               : dray__frame_send(socket, data, size, fds, fd_count);
}

void dray__close_fds(int *fds, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (fds[i] >= 0)
            close(fds[i]);
        fds[i] = -1;
    }
}

void dray__inbox_free(dray__inbox *inbox)
{
    dray__close_fds(inbox->fds, inbox->fd_count);
    free(inbox->data);
    *inbox = (dray__inbox){0};
}

/* Makes room for the rest of the frame, but at most doubles the bytes that have arrived, so that a
 * forged length costs the sender as many bytes as us. */
static int make_room(dray__inbox *inbox, dray_error *error)
{
    size_t have = inbox->end - inbox->begin, want = READ_AHEAD;
    if (!have) {
        inbox->begin = inbox->end = 0;
        if (inbox->capacity > KEEP) {
            free(inbox->data);
            inbox->data = NULL;
            inbox->capacity = 0;
        }
    }
    if (have >= DRAY__FRAME_HEADER) {
        size_t whole = DRAY__FRAME_HEADER + (size_t)payload_size(inbox->data + inbox->begin);
        size_t rest = whole > have ? whole - have : 0;
        if (rest > want)
            want = rest < have ? rest : (have > want ? have : want);
    }
    if (inbox->capacity - inbox->end >= want)
        return DRAY_OK;
    if (inbox->begin) {
        memmove(inbox->data, inbox->data + inbox->begin, have);
        inbox->begin = 0;
        inbox->end = have;
    }
    if (inbox->capacity - have < want) {
        uint8_t *data = realloc(inbox->data, have + want);
        if (!data)
            return dray__nomem(error);
        inbox->data = data;
        inbox->capacity = have + want;
    }
    return DRAY_OK;
}

/* Takes the descriptors of a received message. Returns true when there was room for all. */
static bool keep_fds(dray__inbox *inbox, struct msghdr *message)
{
    bool fitted = !(message->msg_flags & MSG_CTRUNC);
    for (struct cmsghdr *header = CMSG_FIRSTHDR(message); header;
         header = CMSG_NXTHDR(message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
            continue;
        size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(header) + i * sizeof fd, sizeof fd);
            if (inbox->fd_count < DRAY__FRAME_FDS) {
                inbox->fds[inbox->fd_count++] = fd;
            } else {
                close(fd);
                fitted = false;
            }
        }
    }
    return fitted;
}

/* Returns how much may be read. While descriptors wait for the rest of their frame, nothing after
 * that frame is read, because more descriptors could come than there is room for. */
static size_t readable(const dray__inbox *inbox)
{
    size_t have = inbox->end - inbox->begin, room = inbox->capacity - inbox->end;
    if (!inbox->fd_count || !have)
        return room;
    size_t whole = DRAY__FRAME_HEADER;
    if (have >= DRAY__FRAME_HEADER)
        whole += payload_size(inbox->data + inbox->begin);
    size_t rest = whole > have ? whole - have : room;
    return rest < room ? rest : room;
}

static int broke(int code, dray_error *error)
{
    dray__fail_errno(error, code, "connection broke");
    if (error)
        error->code = DRAY_ECLOSED;
    return DRAY_ECLOSED;
}

static int ended(dray_error *error)
{
    return dray__fail(error, DRAY_ECLOSED, "the other side closed the connection");
}

static int fill_tls(dray__inbox *inbox, dray_error *error)
{
    ssize_t n = dray__tls_recv(inbox->tls, inbox->data + inbox->end, readable(inbox));
    if (n == -EAGAIN)
        return DRAY_EAGAIN;
    if (n < 0)
        return broke((int)-n, error);
    inbox->end += (size_t)n;
    return n ? DRAY_OK : ended(error);
}

int dray__inbox_fill(dray__inbox *inbox, int socket, dray_error *error)
{
    int status = make_room(inbox, error);
    if (status)
        return status;
    if (inbox->tls)
        return fill_tls(inbox, error);
    union {
        char bytes[CMSG_SPACE(sizeof(int) * DRAY__FRAME_FDS)];
        struct cmsghdr align;
    } control;
    struct iovec part = {.iov_base = inbox->data + inbox->end, .iov_len = readable(inbox)};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    ssize_t n;
    do
        n = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return DRAY_EAGAIN;
    if (n < 0)
        return broke(errno, error);
    bool fitted = keep_fds(inbox, &message);
    if (n == 0)
        return ended(error);
    inbox->end += (size_t)n;
    if (!fitted && message.msg_flags & MSG_CTRUNC)
        return dray__fail_errno(error, EMFILE, "not all descriptors of a frame could be taken"),
               DRAY_EPROTO;
    if (!fitted)
        return dray__fail(error, DRAY_EPROTO, "more than %u descriptors with one frame",
                          DRAY__FRAME_FDS);
    return DRAY_OK;
}

static int check_header(const dray__inbox *inbox, const uint8_t *at, dray__frame *frame,
                        uint64_t *sum, dray_error *error)
{
    const dray__frame_header header = get_header(at);
    if (header.magic != DRAY__FRAME_MAGIC)
        return dray__fail(error, DRAY_EPROTO, "not a dray frame: expected magic %08x, found %08x",
                          DRAY__FRAME_MAGIC, header.magic);
    *sum = header.sum;
    frame->type = header.type;
    frame->fd_count = header.fd_count;
    frame->id = header.id;
    frame->size = header.size;
    frame->flags = header.flags;
    uint32_t most = inbox->most ? inbox->most : DRAY__FRAME_MAX;
    if (frame->size > most)
        return dray__fail(error, DRAY_EPROTO, "frame of %u bytes, at most %u expected", frame->size,
                          most);
    /* Descriptors arrive with the frame's first byte, so all are here by now. */
    if (frame->fd_count > inbox->fd_count)
        return dray__fail(error, DRAY_EPROTO, "frame says %u descriptors, %u came", frame->fd_count,
                          inbox->fd_count);
    return DRAY_OK;
}

int dray__inbox_take(dray__inbox *inbox, dray__frame *frame, int fds[DRAY__FRAME_FDS],
                     dray_error *error)
{
    *frame = (dray__frame){0};
    size_t have = inbox->end - inbox->begin;
    if (have < DRAY__FRAME_HEADER) {
        if (have == 0 && inbox->fd_count)
            return dray__fail(error, DRAY_EPROTO, "%u descriptors that no frame announced",
                              inbox->fd_count);
        return DRAY_EAGAIN;
    }
    uint8_t *at = inbox->data + inbox->begin;
    uint64_t sum = 0;
    int status = check_header(inbox, at, frame, &sum, error);
    if (status)
        return status;
    if (have - DRAY__FRAME_HEADER < frame->size)
        return DRAY_EAGAIN;
    memset(at + AT_SUM, 0, sizeof sum);
    if (dray__hash(at, DRAY__FRAME_HEADER + (size_t)frame->size) != sum)
        return dray__fail(error, DRAY_ECHECKSUM, "frame %s: its checksum does not match its bytes",
                          dray__message_name(frame->type));
    frame->payload = at + DRAY__FRAME_HEADER;
    inbox->begin += DRAY__FRAME_HEADER + (size_t)frame->size;
    memcpy(fds, inbox->fds, sizeof(int) * frame->fd_count);
    inbox->fd_count -= frame->fd_count;
    memmove(inbox->fds, inbox->fds + frame->fd_count, sizeof(int) * inbox->fd_count);
    return DRAY_OK;
}
