/* Words that say who somebody is, and where: they come from files, the environment and connections.
 * The first byte says which:
 *
 *  0  a token's text           1  a token's file         2  a coordinator's state file
 *  3  the identity that a client shows over TLS          4  a coordinator's address
 *  5  a list of networks
 *
 * What is taken is printed, and read again, as it was; an identity gets a key only under the master
 * token that it was made of. */
#include "fuzz/fuzz.h"

#include "base/network.h"
#include "control/token.h"

#include <string.h>

static bool as_text(const uint8_t *data, size_t size, char *out, size_t capacity)
{
    if (size >= capacity || memchr(data, 0, size))
        return false;
    memcpy(out, data, size);
    out[size] = 0;
    return true;
}

static void check(const dray__token *token)
{
    char text[DRAY__TOKEN_TEXT];
    dray__token again, derived;
    const char *role = dray__token_role_of(token->identity);
    MUST(dray__token_parse(dray__token_print(token, text), "again", &again, NULL) == 0);
    MUST(memcmp(&again, token, sizeof again) == 0);
    MUST(dray__role_bits(role));
    bool master = dray__role_bits(role) == DRAY__MAY_ALL;
    int rc = dray__token_derive(token, "engine", &derived, NULL);
    MUST(rc == (master ? DRAY_OK : DRAY_EINVALID));
    MUST(rc || dray__role_bits(dray__token_role_of(derived.identity)) == DRAY__MAY_ENGINE);
}

static void text(const uint8_t *data, size_t size)
{
    char copy[512];
    dray__token token;
    if (as_text(data, size, copy, sizeof copy) &&
        dray__token_parse(copy, "fuzz", &token, NULL) == DRAY_OK)
        check(&token);
}

static void file(const uint8_t *data, size_t size)
{
    dray__token token;
    const char *path = fuzz_path("token");
    fuzz_write(path, data, size);
    if (dray__token_read(path, &token, NULL) == DRAY_OK)
        check(&token);
    dray__token_master(path, &token, NULL);
}

static void state(const uint8_t *data, size_t size)
{
    dray__token token, next;
    uint64_t generation, then;
    const char *path = fuzz_path("state");
    fuzz_write(path, data, size);
    if (dray__token_state(path, &token, &generation, NULL))
        return;
    check(&token);
    MUST(dray__token_state(path, &next, &then, NULL) == 0);
    MUST(then == generation + 1 && memcmp(next.bytes, token.bytes, sizeof next.bytes) == 0);
}

static void identity(const uint8_t *data, size_t size)
{
    static const dray__token master = {.identity = "dray1.0123456789abcdef.master", .bytes = "m"};
    static const char head[] = "dray1.0123456789abcdef.";
    dray__tls_key key = {0};
    if (!as_text(data, size, key.identity, sizeof key.identity))
        return;
    if (dray__token_answer(&master, &key))
        MUST(strncmp(key.identity, head, sizeof head - 1) == 0 &&
             dray__role_bits(key.identity + sizeof head - 1));
}

static void address(const uint8_t *data, size_t size)
{
    char copy[512];
    dray__address out;
    if (!as_text(data, size, copy, sizeof copy))
        return;
    for (const char *c = copy; *c; c++) /* nobody's name is looked up */
        if (strncmp(copy, "unix:", 5) != 0 && !strchr("tcp:[]0123456789.", *c))
            return;
    if (dray__address_parse(copy, &out, NULL) == DRAY_OK)
        MUST(out.size <= sizeof out.socket && (!out.local || out.socket.ss_family == AF_UNIX));
}

static void networks(const uint8_t *data, size_t size)
{
    char copy[512];
    dray__networks out;
    if (as_text(data, size, copy, sizeof copy) && dray__networks_parse(copy, &out, NULL) == 0) {
        MUST(out.count <= DRAY__NETWORKS_MAX);
        for (uint32_t i = 0; i < out.count; i++)
            MUST(out.items[i].bits <= 128);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const all[])(const uint8_t *, size_t) = {text,     file,    state,
                                                           identity, address, networks};
    if (size)
        all[data[0] % (sizeof all / sizeof *all)](data + 1, size - 1);
    return 0;
}

#define KEY "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"

void fuzz_seeds(fuzz_put put, void *user)
{
    static const struct {
        uint8_t kind;
        const char *text;
    } seeds[] = {{0, "dray1.0123456789abcdef.engine." KEY},
                 {0, "dray1.0123456789abcdef.master." KEY "\n"},
                 {1, "dray1.0123456789abcdef.master." KEY "\n"},
                 {2, "dray1.0000000000000007.master." KEY "\n"},
                 {3, "dray1.0123456789abcdef.trainer"},
                 {4, "tcp:127.0.0.1:7000"},
                 {4, "tcp:[::1]:7000"},
                 {4, "unix:/tmp/dray.socket"},
                 {5, "10.1.0.0/16, fd00::/8 192.168.1.7"}};
    for (size_t i = 0; i < sizeof seeds / sizeof *seeds; i++)
        fuzz_put_text(put, user, seeds[i].kind, seeds[i].text);
}
