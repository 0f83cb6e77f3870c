#include "control/token.h"

#include "base/error.h"
#include "base/io.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define PREFIX "dray1."

enum {
    PREFIX_SIZE = sizeof PREFIX - 1,
    SESSION_DIGITS = 16,
    ROLE_AT = PREFIX_SIZE + SESSION_DIGITS + 1,
    KEY_DIGITS = 2 * DRAY__TLS_KEY,
    BESIDE = 4200 /* bytes of the name of a file beside another one */
};

/* ---- roles ----------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    uint32_t bits;
} roles[] = {{"trainer", DRAY__MAY_TRAINER},
             {"engine", DRAY__MAY_ENGINE},
             {"task", DRAY__MAY_TASK},
             {"tool", DRAY__MAY_TOOL},
             {"master", DRAY__MAY_ALL}};

uint32_t dray__role_bits(const char *role)
{
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
        if (strcmp(roles[i].name, role) == 0)
            return roles[i].bits;
    return 0;
}

const char *dray__token_role_of(const char *identity)
{
    return strncmp(identity, PREFIX, PREFIX_SIZE) == 0 && strlen(identity) > ROLE_AT
               ? identity + ROLE_AT
               : "";
}

/* ---- making them ----------------------------------------------------------------------------- */

static void print_hex(const uint8_t *bytes, size_t count, char *out)
{
    for (size_t i = 0; i < count; i++)
        snprintf(out + 2 * i, 3, "%02x", bytes[i]);
}

static int draw(const char *role, dray__token *out, dray_error *error)
{
    uint8_t session[SESSION_DIGITS / 2];
    char digits[SESSION_DIGITS + 1];
    dray__token token = {{0}, {0}};
    if (getrandom(token.bytes, sizeof token.bytes, 0) != (ssize_t)sizeof token.bytes ||
        getrandom(session, sizeof session, 0) != (ssize_t)sizeof session)
        return dray__fail_errno(error, errno, "token: getrandom");
    print_hex(session, sizeof session, digits);
    snprintf(token.identity, sizeof token.identity, PREFIX "%s.%s", digits, role);
    *out = token;
    dray__forget_bytes(&token, sizeof token);
    return DRAY_OK;
}

int dray__token_draw(dray__token *out, dray_error *error)
{
    return draw("master", out, error);
}

int dray__token_data(dray__token *out, dray_error *error)
{
    return draw("data", out, error);
}

/* Fills in the key of an identity, if its role is one that tokens can have. */
static bool derive(const dray__token *master, dray__tls_key *key)
{
    char text[DRAY__TLS_IDENTITY + 16];
    snprintf(text, sizeof text, "dray1 role %s", dray__token_role_of(key->identity));
    return dray__derive_key(master->bytes, text, key->bytes);
}

int dray__token_derive(const dray__token *master, const char *role, dray__token *out,
                       dray_error *error)
{
    const char *of = dray__token_role_of(master->identity);
    if (strcmp(of, "master") != 0)
        return dray__fail(
            error, DRAY_EINVALID,
            "token of the role %s: a master token expected, from which others are made", of);
    uint32_t bits = dray__role_bits(role);
    if (!bits || bits == DRAY__MAY_ALL)
        return dray__fail(error, DRAY_EINVALID,
                          "token: a role of trainer, engine, task or tool expected, found '%.64s'",
                          role);
    dray__token token = {{0}, {0}};
    snprintf(token.identity, sizeof token.identity, "%.*s%s", ROLE_AT, master->identity, role);
    if (!derive(master, &token))
        return dray__nomem(error);
    *out = token;
    dray__forget_bytes(&token, sizeof token);
    return DRAY_OK;
}

bool dray__token_answer(const dray__token *master, dray__tls_key *key)
{
    uint32_t bits = dray__role_bits(dray__token_role_of(key->identity));
    if (!bits || strncmp(master->identity, key->identity, ROLE_AT) != 0)
        return false;
    if (bits != DRAY__MAY_ALL)
        return derive(master, key);
    memcpy(key->bytes, master->bytes, sizeof key->bytes);
    return true;
}

/* ---- as text --------------------------------------------------------------------------------- */

static int digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static size_t count_digits(const char *text)
{
    size_t count = 0;
    while (digit(text[count]) >= 0)
        count++;
    return count;
}

int dray__token_parse(const char *text, const char *where, dray__token *out, dray_error *error)
{
    dray__token token = {{0}, {0}};
    bool good = strncmp(text, PREFIX, PREFIX_SIZE) == 0 &&
                count_digits(text + PREFIX_SIZE) == SESSION_DIGITS &&
                text[PREFIX_SIZE + SESSION_DIGITS] == '.';
    const char *role = text + PREFIX_SIZE + SESSION_DIGITS + 1;
    const char *dot = good ? strchr(role, '.') : NULL;
    const char *end = dot ? dot + 1 + KEY_DIGITS : NULL;
    if (!dot || dot - text >= DRAY__TLS_IDENTITY || count_digits(dot + 1) != KEY_DIGITS ||
        (*end && strcmp(end, "\n") != 0))
        return dray__fail(
            error, DRAY_EFORMAT,
            "%s: a token expected: dray1.SESSION.ROLE.KEY, with 16 hexadecimal digits "
            "of a session and 64 of a key",
            where);
    memcpy(token.identity, text, (size_t)(dot - text));
    if (!dray__role_bits(dray__token_role_of(token.identity)))
        return dray__fail(
            error, DRAY_EFORMAT,
            "%s: token of an unknown role '%s': trainer, engine, task, tool or master "
            "expected",
            where, dray__token_role_of(token.identity));
    for (size_t i = 0; i < sizeof token.bytes; i++)
        token.bytes[i] = (uint8_t)(digit(dot[1 + 2 * i]) << 4 | digit(dot[2 + 2 * i]));
    *out = token;
    dray__forget_bytes(&token, sizeof token);
    return DRAY_OK;
}

char *dray__token_print(const dray__token *token, char out[DRAY__TOKEN_TEXT])
{
    int n = snprintf(out, DRAY__TOKEN_TEXT, "%s.", token->identity);
    print_hex(token->bytes, sizeof token->bytes, out + n);
    return out;
}

/* ---- in files -------------------------------------------------------------------------------- */

int dray__token_read(const char *path, dray__token *out, dray_error *error)
{
    struct stat st;
    char text[DRAY__TOKEN_TEXT + 8] = "", where[4200];
    snprintf(where, sizeof where, "token file %s", path);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0 && errno == ENOENT)
        return dray__fail(error, DRAY_ENOENT, "%s: no such file", where);
    if (fd < 0)
        return dray__fail_errno(error, errno, "%s", where);
    int status = DRAY_OK;
    if (fstat(fd, &st) < 0)
        status = dray__fail_errno(error, errno, "%s", where);
    else if (st.st_uid != geteuid()) /* checked for root, too, because root can read any file */
        status = dray__fail(error, DRAY_EPERM,
                            "%s: a file of this user (%u) expected, it is one of user %u", where,
                            (unsigned)geteuid(), (unsigned)st.st_uid);
    else if (!S_ISREG(st.st_mode) || (st.st_mode & (S_IRWXG | S_IRWXO)))
        status = dray__fail(error, DRAY_EPERM,
                            "%s: a file expected that only this user can read (chmod 600)", where);
    else if (read(fd, text, sizeof text - 1) < 0)
        status = dray__fail_errno(error, errno, "%s", where);
    close(fd);
    if (!status)
        status = dray__token_parse(text, where, out, error);
    dray__forget_bytes(text, sizeof text);
    return status;
}

/* Writes a file beside `path` whose name no other writer has. The process's number is not enough:
 * in containers that share a folder all have the same. */
static int write_beside(const char *path, const dray__token *token, char temporary[BESIDE],
                        dray_error *error)
{
    char text[DRAY__TOKEN_TEXT + 1];
    snprintf(temporary, BESIDE, "%.4096s.XXXXXX", path);
    int fd = mkostemp(temporary, O_CLOEXEC); /* mode 0600 */
    if (fd < 0)
        return dray__fail_errno(error, errno, "token file %s", path);
    strcat(dray__token_print(token, text), "\n");
    int code = dray__write_all(fd, text, strlen(text)) < 0 || fsync(fd) < 0 ? errno : 0;
    close(fd);
    dray__forget_bytes(text, sizeof text);
    if (code)
        unlink(temporary);
    return code ? dray__fail_errno(error, code, "token file %s", temporary) : DRAY_OK;
}

int dray__token_write(const char *path, const dray__token *token, dray_error *error)
{
    char temporary[BESIDE];
    int status = write_beside(path, token, temporary, error);
    if (status)
        return status;
    /* link() never replaces a file, so of two processes that write at once, one finds the other's
     * file. */
    int code = link(temporary, path) < 0 ? errno : 0;
    unlink(temporary);
    if (code == EEXIST)
        return dray__fail(error, DRAY_EEXIST, "token file %s: is there already", path);
    return code ? dray__fail_errno(error, code, "token file %s", path) : DRAY_OK;
}

int dray__token_keep(const char *path, dray_error *error)
{
    const char *text = getenv("DRAY_TOKEN");
    dray__token token;
    if (!text || !text[0])
        return DRAY_OK;
    int status = dray__token_parse(text, "$DRAY_TOKEN", &token, error);
    if (!status && unlink(path) < 0 && errno != ENOENT)
        status = dray__fail_errno(error, errno, "%s", path);
    if (!status)
        status = dray__token_write(path, &token, error);
    dray__forget_bytes(&token, sizeof token);
    return status;
}

int dray__token_master(const char *path, dray__token *out, dray_error *error)
{
    dray__token token;
    int status = dray__token_read(path, &token, error);
    if (status == DRAY_ENOENT) {
        status = dray__token_draw(&token, error);
        if (!status)
            status = dray__token_write(path, &token, error);
        if (status == DRAY_EEXIST) /* another server made it first */
            status = dray__token_read(path, &token, error);
    }
    if (!status && strcmp(dray__token_role_of(token.identity), "master") != 0)
        status =
            dray__fail(error, DRAY_EINVALID,
                       "token file %s: a server's master token expected, found one of the role %s",
                       path, dray__token_role_of(token.identity));
    if (!status)
        *out = token;
    dray__forget_bytes(&token, sizeof token);
    return status;
}

/* The file is like a token's, with the number of coordinators in place of the session's digits. */
int dray__token_state(const char *path, dray__token *out, uint64_t *generation, dray_error *error)
{
    char fresh[BESIDE];
    dray__token token;
    uint64_t count = 0;
    int status = dray__token_read(path, &token, error);
    if (status == DRAY_ENOENT)
        status = dray__token_draw(&token, error);
    else if (!status)
        count = strtoull(token.identity + PREFIX_SIZE, NULL, 16);
    if (status)
        return status;
    snprintf(token.identity, sizeof token.identity, PREFIX "%016" PRIx64 ".master", ++count);
    status = write_beside(path, &token, fresh, error);
    if (!status && rename(fresh, path) < 0) {
        status = dray__fail_errno(error, errno, "state file %s", path);
        unlink(fresh);
    }
    if (!status) {
        *out = token;
        *generation = count;
    }
    dray__forget_bytes(&token, sizeof token);
    return status;
}

bool dray__token_data_of(const dray__token *state, dray__token *out)
{
    uint8_t name[DRAY__TLS_KEY];
    char digits[SESSION_DIGITS + 1];
    if (!dray__derive_key(state->bytes, "dray1 members' name", name) ||
        !dray__derive_key(state->bytes, "dray1 members' key", out->bytes))
        return false;
    print_hex(name, SESSION_DIGITS / 2, digits);
    snprintf(out->identity, sizeof out->identity, PREFIX "%s.data", digits);
    return true;
}

bool dray__token_path(const dray__address *address, char *out, size_t capacity)
{
    const struct sockaddr_in *v4 = (const struct sockaddr_in *)&address->socket;
    const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)&address->socket;
    unsigned port = ntohs(address->socket.ss_family == AF_INET6 ? v6->sin6_port : v4->sin_port);
    const char *folder = getenv("XDG_RUNTIME_DIR");
    return folder && folder[0] == '/' &&
           snprintf(out, capacity, "%s/dray-tcp-%u.token", folder, port) < (int)capacity;
}

int dray__token_find(const dray__address *address, dray__token *out, dray_error *error)
{
    const char *text = getenv("DRAY_TOKEN"), *file = getenv("DRAY_TOKEN_FILE");
    char path[4096];
    if (text && text[0])
        return dray__token_parse(text, "$DRAY_TOKEN", out, error);
    if (file && file[0])
        return dray__token_read(file, out, error);
    bool placed = dray__token_path(address, path, sizeof path);
    int status = placed ? dray__token_read(path, out, error) : DRAY_ENOENT;
    return status == DRAY_ENOENT
               ? dray__fail(error, status,
                            "a coordinator over TCP wants a token: set $DRAY_TOKEN_FILE to a file "
                            "that `dray token` made on its host (%s%s)",
                            placed ? "there is none at " : "$XDG_RUNTIME_DIR is not set, either",
                            placed ? path : "")
               : status;
}
