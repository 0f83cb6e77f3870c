# cmake -DOUT=x.c -DHEADER=x.h -DFILES="a;b" -DNAMES="na;nb" -P embed.cmake: C arrays of the files' bytes, each
# ended by a 0 that does not count, and their sizes. A file that is not there is empty.
set(text "/* Made by cmake/embed.cmake. */\n#include \"${HEADER}\"\n")
foreach(file name IN ZIP_LISTS FILES NAMES)
  set(hex "")
  if(EXISTS "${file}")
    file(READ "${file}" hex HEX)
  endif()
  string(LENGTH "${hex}" digits)
  math(EXPR bytes "${digits} / 2")
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," hex "${hex}")
  string(APPEND text "const unsigned char ${name}[] __attribute__((aligned(16))) = {${hex}0};\n"
    "const unsigned long ${name}_size = ${bytes};\n")
endforeach()
file(WRITE "${OUT}.new" "${text}")
file(COPY_FILE "${OUT}.new" "${OUT}" ONLY_IF_DIFFERENT)
