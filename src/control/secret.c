#include "control/secret.h"

#include "base/error.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

/* In the file: two hexadecimal digits a byte, and a newline. */
enum { DIGITS = 2 * (int)sizeof(dray__secret) };

char *dray__secret_path(const dray__address *address, char *out, size_t capacity)
{
    const struct sockaddr_in *v4 = (const struct sockaddr_in *)&address->socket;
    const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)&address->socket;
    unsigned port = ntohs(address->socket.ss_family == AF_INET6 ? v6->sin6_port : v4->sin_port);
    const char *file = getenv("DRAY_TOKEN_FILE"), *folder = getenv("XDG_RUNTIME_DIR");
    if (file && file[0])
        snprintf(out, capacity, "%s", file);
    else if (folder && folder[0] == '/')
        snprintf(out, capacity, "%s/dray-tcp-%u.token", folder, port);
    else
        snprintf(out, capacity, "/tmp/dray-%u-tcp-%u.token", (unsigned)geteuid(), port);
    return out;
}

int dray__secret_make(const char *path, dray__secret *out, struct stat *st, dray_error *error)
{
    char text[DIGITS + 2];
    if (getrandom(out->bytes, sizeof out->bytes, 0) != (ssize_t)sizeof out->bytes)
        return dray__fail_errno(error, errno, "token: getrandom");
    for (size_t i = 0; i < sizeof out->bytes; i++)
        snprintf(text + 2 * i, 3, "%02x", out->bytes[i]);
    text[DIGITS] = '\n';
    if (unlink(path) < 0 && errno != ENOENT) /* of a server that was killed */
        return dray__fail_errno(error, errno, "token file %s", path);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR);
    int status = DRAY_OK;
    if (fd < 0 || fstat(fd, st) < 0 || write(fd, text, DIGITS + 1) != DIGITS + 1)
        status = dray__fail_errno(error, errno, "token file %s", path);
    if (fd >= 0)
        close(fd);
    if (status && fd >= 0)
        unlink(path);
    return status;
}

static int digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static int parse(const char *path, const char *text, dray__secret *out, dray_error *error)
{
    dray__secret secret;
    for (size_t i = 0; i < sizeof secret.bytes; i++) {
        int high = digit(text[2 * i]), low = high < 0 ? -1 : digit(text[2 * i + 1]);
        if (low < 0)
            return dray__fail(error, DRAY_EFORMAT, "token file %s: %d hexadecimal digits expected",
                              path, DIGITS);
        secret.bytes[i] = (uint8_t)(high << 4 | low);
    }
    *out = secret;
    return DRAY_OK;
}

int dray__secret_read(const char *path, dray__secret *out, dray_error *error)
{
    struct stat st;
    char text[DIGITS + 1] = "";
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0 && errno == ENOENT)
        return dray__fail(error, DRAY_ENOENT, "token file %s: no such file", path);
    if (fd < 0)
        return dray__fail_errno(error, errno, "token file %s", path);
    int status = DRAY_OK;
    if (fstat(fd, &st) < 0)
        status = dray__fail_errno(error, errno, "token file %s", path);
    else if (!S_ISREG(st.st_mode) || (st.st_uid != geteuid() && geteuid() != 0) ||
             (st.st_mode & (S_IRWXG | S_IRWXO)))
        status = dray__fail(error, DRAY_EPERM,
                            "token file %s: a file expected that only this user can read", path);
    else if (read(fd, text, DIGITS) < 0)
        status = dray__fail_errno(error, errno, "token file %s", path);
    close(fd);
    return status ? status : parse(path, text, out, error);
}

bool dray__same_bytes(const void *a, const void *b, size_t size)
{
    const uint8_t *x = a, *y = b;
    unsigned differ = 0;
    for (size_t i = 0; i < size; i++)
        differ |= (unsigned)(x[i] ^ y[i]);
    return differ == 0;
}
