# An installed copy is complete: a C program finds it through pkg-config and through CMake, C++ reads
# its headers, every header stands alone, and the library exports what the headers declare.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail()
{
    echo "FAILED: $*" >&2
    exit 1
}

cmake --install "$DRAY_BUILD_DIR" --prefix "$work/usr" >/dev/null
DESTDIR="$work/dest" cmake --install "$DRAY_BUILD_DIR" --prefix /opt/dray >/dev/null
(cd "$work/usr" && find . ! -type d | sort) >"$work/plain"
(cd "$work/dest/opt/dray" && find . ! -type d | sort) >"$work/staged"
diff "$work/plain" "$work/staged" || fail 'DESTDIR installs other files'
for file in bin/dray include/dray/dray.h share/dray/libdray.map share/man/man1/dray.1; do
    [ -e "$work/usr/$file" ] || fail "no $file"
done
pages=$(find "$DRAY_SOURCE_DIR/docs/man" -name '*.1' | wc -l)
[ "$(find "$work/usr/share/man" -name '*.1' | wc -l)" = "$pages" ] || fail 'manual pages are missing'

cat >"$work/use.c" <<'END'
#include <dray/dray.h>
#include <dray/model.h>
#include <stdio.h>
#include <string.h>

int main(void)
{
    dray_error error;
    dray_layout *layout = NULL;
    uint32_t tensor;
    const int64_t shape[] = {4, 2};
    if (dray_layout_new(&layout, &error) ||
        dray_layout_add_tensor(layout, "weight", DRAY_F32, 2, shape, &tensor, &error))
        return 1;
    printf("%s %u\n", dray_version(), dray_layout_tensor_count(layout));
    dray_layout_free(layout);
    return strcmp(dray_error_name(DRAY_EHOLE), "EHOLE") != 0;
}
END
said="$("$work/usr/bin/dray" --version | cut -d' ' -f2) 1"

cc=${CC:-cc}
for prefix in "$work/usr" "$work/dest/opt/dray"; do
    PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name dray.pc)")
    export PKG_CONFIG_PATH
    libraries=$(dirname "$PKG_CONFIG_PATH")
    # shellcheck disable=SC2046 # flags
    $cc -std=c17 -Wall -Werror "$work/use.c" -o "$work/use" $(pkg-config --cflags --libs dray)
    [ "$(LD_LIBRARY_PATH=$libraries "$work/use")" = "$said" ] || fail "pkg-config, $prefix"
    if readelf -d "$work/use" | grep -q 'NEEDED.*libevent'; then
        fail 'dray.pc links libevent into programs that use the shared library'
    fi
    # shellcheck disable=SC2046 # flags
    $cc -std=c17 "$work/use.c" -o "$work/use" $(pkg-config --cflags dray) "$libraries/libdray.a" \
        $(pkg-config --static --libs dray | sed 's/-ldray//')
    [ "$("$work/use")" = "$said" ] || fail "static, $prefix"
done
[ "$(pkg-config --modversion dray) 1" = "$said" ] || fail 'dray.pc has another version'

mkdir "$work/project"
mv "$work/use.c" "$work/project"
cat >"$work/project/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.22)
project(use C)
find_package(dray 0.1 REQUIRED)
add_executable(use use.c)
target_link_libraries(use PRIVATE dray::dray)
add_executable(use_static use.c)
target_link_libraries(use_static PRIVATE dray::dray_static)
END
cmake -S "$work/project" -B "$work/project/build" -DCMAKE_PREFIX_PATH="$work/usr" >"$work/log" 2>&1 &&
    cmake --build "$work/project/build" >>"$work/log" 2>&1 || {
    cat "$work/log"
    fail 'CMake package'
}
for program in use use_static; do
    [ "$("$work/project/build/$program")" = "$said" ] || fail "CMake, $program"
done

# Python: a fresh environment that is told where the package is; it finds the library by itself.
python=${DRAY_TEST_PYTHON:-python3}
if "$python" -m venv --without-pip "$work/venv" >/dev/null 2>&1; then
    packages=$work/usr/lib/python3/dist-packages
    echo "$packages" >"$(echo "$work"/venv/lib/python3*/site-packages)/dray.pth"
    [ "$(env -u DRAY_LIBRARY -u PYTHONPATH -u LD_LIBRARY_PATH "$work/venv/bin/python" -c \
        'import dray; print(dray.version(), int(dray.library_path().startswith("/")))')" = "$said" ] ||
        fail 'the Python package'
    [ -z "$(find "$packages" ! -name '*.py' ! -name '*.pyc' ! -name py.typed ! -type d)" ] || fail 'more than Python'
else
    echo 'no venv: the Python package was not tried'
fi

# The example: four processes, three versions, each verified.
PKG_CONFIG_PATH=$(dirname "$(find "$work/usr" -name dray.pc)")
libraries=$(dirname "$PKG_CONFIG_PATH")
# shellcheck disable=SC2046 # flags
$cc -std=c17 -Wall -Wextra -Werror "$DRAY_SOURCE_DIR/examples/update.c" -o "$work/update" \
    $(pkg-config --cflags --libs dray)
cat >"$work/config.json" <<'END'
{"model_type": "qwen2", "vocab_size": 259, "hidden_size": 64, "intermediate_size": 192,
 "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
 "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
 "tie_word_embeddings": true, "torch_dtype": "float32"}
END
export DRAY_ADDRESS="unix:$work/socket"
"$work/usr/bin/dray" serve --listen "$DRAY_ADDRESS" >"$work/served" 2>&1 &
server=$!
ranks=
for rank in 'trainer 0' 'trainer 1' 'engine 0' 'engine 1'; do
    # shellcheck disable=SC2086 # role and rank
    LD_LIBRARY_PATH=$libraries "$work/update" $rank "$work/config.json" >>"$work/updates" 2>&1 &
    ranks="$ranks $!"
done
for rank in $ranks; do
    wait "$rank" || { cat "$work/updates"; kill "$server"; fail 'examples/update.c'; }
done
kill "$server"
wait "$server" || fail 'dray serve did not end well'
[ "$(grep -c '"version":3' "$work/updates")" = 2 ] || fail 'examples/update.c: no third version'
unset DRAY_ADDRESS

# Headers: alone, strict, both languages.
for header in "$work"/usr/include/dray/*.h; do
    name=$(basename "$header")
    echo "#include <dray/$name>" >"$work/alone.c"
    $cc -std=c17 -Wall -Wextra -Wpedantic -Werror -I"$work/usr/include" -fsyntax-only \
        "$work/alone.c" || fail "$name in C"
    if command -v c++ >/dev/null; then
        c++ -std=c++17 -Wall -Wextra -Wpedantic -Werror -I"$work/usr/include" -fsyntax-only \
            -x c++ "$work/alone.c" || fail "$name in C++"
    fi
    $cc -E -P -I"$work/usr/include" "$work/alone.c"
done | grep -oE '\bdray_[a-z0-9_]+ *\(' | tr -d ' (' | sort -u >"$work/declared"

nm -D --defined-only "$(find "$work/usr" -name 'libdray.so')" | awk '$2 != "A" { print $3 }' |
    sed 's/@.*//' | sort -u >"$work/exported"
[ -s "$work/exported" ] || fail 'nothing is exported'
comm -13 "$work/declared" "$work/exported" >"$work/undeclared"
[ ! -s "$work/undeclared" ] || fail "exported, but in no header: $(tr '\n' ' ' <"$work/undeclared")"
comm -23 "$work/declared" "$work/exported" >"$work/undefined"
[ ! -s "$work/undefined" ] || fail "declared, but not exported: $(tr '\n' ' ' <"$work/undefined")"
echo "installed copy works; $(wc -l <"$work/exported") functions"
