/* libcurl, opened at run time. The constants are those of the ABI of libcurl.so.4, which does not
 * change (curl/curl.h; curl.c compares them with that header if it is installed). */
#pragma once

#include <dray/dray.h>
#include <stddef.h>
#include <stdint.h>

enum {
    DRAY__CURLOPT_WRITEDATA = 10001,
    DRAY__CURLOPT_URL = 10002,
    DRAY__CURLOPT_RANGE = 10007,
    DRAY__CURLOPT_READDATA = 10009,
    DRAY__CURLOPT_ERRORBUFFER = 10010,
    DRAY__CURLOPT_POSTFIELDS = 10015,
    DRAY__CURLOPT_HTTPHEADER = 10023,
    DRAY__CURLOPT_HEADERDATA = 10029,
    DRAY__CURLOPT_CUSTOMREQUEST = 10036,
    DRAY__CURLOPT_XFERINFODATA = 10057,
    DRAY__CURLOPT_SEEKDATA = 10168,
    DRAY__CURLOPT_USERNAME = 10173,
    DRAY__CURLOPT_PASSWORD = 10174,
    DRAY__CURLOPT_AWS_SIGV4 = 10305,
    DRAY__CURLOPT_WRITEFUNCTION = 20011,
    DRAY__CURLOPT_READFUNCTION = 20012,
    DRAY__CURLOPT_HEADERFUNCTION = 20079,
    DRAY__CURLOPT_SEEKFUNCTION = 20167,
    DRAY__CURLOPT_XFERINFOFUNCTION = 20219,
    DRAY__CURLOPT_INFILESIZE_LARGE = 30115,
    DRAY__CURLOPT_POSTFIELDSIZE_LARGE = 30120,
    DRAY__CURLOPT_LOW_SPEED_LIMIT = 19,
    DRAY__CURLOPT_LOW_SPEED_TIME = 20,
    DRAY__CURLOPT_NOPROGRESS = 43,
    DRAY__CURLOPT_NOBODY = 44,
    DRAY__CURLOPT_UPLOAD = 46,
    DRAY__CURLOPT_POST = 47,
    DRAY__CURLOPT_NOSIGNAL = 99,
    DRAY__CURLOPT_CONNECTTIMEOUT_MS = 156,
    DRAY__CURLOPT_PROTOCOLS = 181,
    DRAY__CURLOPT_PATH_AS_IS = 234,
    DRAY__CURLINFO_RESPONSE_CODE = 2097154,
    DRAY__CURLPROTO_HTTP_AND_HTTPS = 3,
    DRAY__CURL_GLOBAL_ALL = 3,
    DRAY__CURLE_OK = 0,
    DRAY__CURLE_WRITE_ERROR = 23,
    DRAY__CURLE_OUT_OF_MEMORY = 27,
    DRAY__CURLE_ABORTED_BY_CALLBACK = 42,
    DRAY__CURL_ERROR_SIZE = 256
};

typedef struct dray__curl_list dray__curl_list; /* struct curl_slist */

/* XX(function, its result's type, its arguments) */
#define DRAY__CURL_FUNCTIONS(XX)                                                                   \
    XX(global_init, int, (long flags))                                                             \
    XX(version, char *, (void))                                                                    \
    XX(easy_init, void *, (void))                                                                  \
    XX(easy_setopt, int, (void *handle, int option, ...))                                          \
    XX(easy_perform, int, (void *handle))                                                          \
    XX(easy_getinfo, int, (void *handle, int info, ...))                                           \
    XX(easy_reset, void, (void *handle))                                                           \
    XX(easy_cleanup, void, (void *handle))                                                         \
    XX(easy_strerror, const char *, (int code))                                                    \
    XX(slist_append, dray__curl_list *, (dray__curl_list * list, const char *text))                \
    XX(slist_free_all, void, (dray__curl_list * list))

typedef struct dray__curl {
#define XX(name, result, arguments) result(*name) arguments;
    DRAY__CURL_FUNCTIONS(XX)
#undef XX
} dray__curl;

/* Opens the library once for the process. Returns 0, or DRAY_EUNSUPPORTED when it is missing or too
 * old, with advice in the message. */
int dray__curl_get(const dray__curl **out, dray_error *error);
