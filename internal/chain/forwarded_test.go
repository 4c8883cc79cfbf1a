package chain

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

func TestElementReader(t *testing.T) {
	for _, test := range []struct {
		why   string
		lines []string
		want  []string
	}{
		{"no header, no elements", nil, nil},
		{"an empty line holds one element, and that is empty", []string{""}, []string{""}},
		{"one element", []string{"for=1.2.3.4"}, []string{"for=1.2.3.4"}},
		{"the rightmost first, with its parameters and white space",
			[]string{"for=6.6.6.6, for=203.0.113.7;proto=https"},
			[]string{" for=203.0.113.7;proto=https", "for=6.6.6.6"}},
		{"the last line is the rightmost",
			[]string{"for=6.6.6.6", "for=203.0.113.7"},
			[]string{"for=203.0.113.7", "for=6.6.6.6"}},
		{"empty elements keep their places", []string{"a=b,,", ""}, []string{"", "", "", "a=b"}},
		{"a comma inside quotes separates nothing",
			[]string{`for=6.6.6.6;by=", for=6.6.6.6", for=203.0.113.7`},
			[]string{" for=203.0.113.7", `for=6.6.6.6;by=", for=6.6.6.6"`}},
		{"not even in the rightmost element",
			[]string{`for=6.6.6.6, for=203.0.113.7;host="a,b"`},
			[]string{` for=203.0.113.7;host="a,b"`, "for=6.6.6.6"}},
		{"a quote left open cannot swallow what is right of it",
			[]string{`for=6.6.6.6;by=", for=203.0.113.7`},
			[]string{" for=203.0.113.7", `for=6.6.6.6;by="`}},
		{"a quote left open cannot meet the quotes of the proxy's element",
			[]string{`for=6.6.6.6;by=", for="[2001:db8::1]:4711"`},
			[]string{` for="[2001:db8::1]:4711"`, `for=6.6.6.6;by="`}},
		{"a quote without a partner swallows what is left of it",
			[]string{`for=5.5.5.5, for=6.6.6.6", for=203.0.113.7`},
			[]string{" for=203.0.113.7", `for=5.5.5.5, for=6.6.6.6"`}},
		{"but not the line above",
			[]string{"for=5.5.5.5", `for=6.6.6.6"`},
			[]string{`for=6.6.6.6"`, "for=5.5.5.5"}},
		{"nor does a quote left open reach into the line below",
			[]string{`for=6.6.6.6;by="`, `for=203.0.113.7;by="x"`},
			[]string{`for=203.0.113.7;by="x"`, `for=6.6.6.6;by="`}},
		{"an escaped quote does not end the string",
			[]string{`a=b,by="x\",y", for=203.0.113.7`},
			[]string{" for=203.0.113.7", `by="x\",y"`, "a=b"}},
		{"an escaped backslash does not escape the quote",
			[]string{`a=b,by="x\\",for=203.0.113.7`},
			[]string{"for=203.0.113.7", `by="x\\"`, "a=b"}},
		{"an escaped backslash and an escaped quote",
			[]string{`a=b,by=",\\\",",for=203.0.113.7`},
			[]string{"for=203.0.113.7", `by=",\\\","`, "a=b"}},
		{"a backslash cannot escape the proxy's comma",
			[]string{`for=6.6.6.6\, for=203.0.113.7`},
			[]string{" for=203.0.113.7", `for=6.6.6.6\`}},
		{"nor its quotes",
			[]string{`for=6.6.6.6;by="\\\,for="[2001:db8::1]"`},
			[]string{`for="[2001:db8::1]"`, `for=6.6.6.6;by="\\\`}},
		{"a quoted string that ends in an escape is none",
			[]string{`by="x\", for=203.0.113.7`},
			[]string{" for=203.0.113.7", `by="x\"`}},
		{"single quotes are characters", []string{"by=',',for=1.2.3.4"}, []string{"for=1.2.3.4", "'", "by='"}},
	} {
		if got := readAll(FromForwarded(test.lines)); !slices.Equal(got, test.want) {
			t.Errorf("%s: elements of %q = %q, want %q", test.why, test.lines, got, test.want)
		}
	}
}

// elementModel splits a line from the left, the obvious way. Where a quoted
// string does not end or a backslash stands outside of one, it has no answer.
func elementModel(line string) (elements []string, wellFormed bool) {
	var element strings.Builder
	quoted, escaped := false, false
	for _, char := range []byte(line) {
		switch {
		case escaped:
			escaped = false
		case char == '\\':
			if !quoted {
				return nil, false
			}
			escaped = true
		case char == '"':
			quoted = !quoted
		case char == ',' && !quoted:
			elements = append(elements, element.String())
			element.Reset()
			continue
		}
		element.WriteByte(char)
	}
	return append(elements, element.String()), !quoted
}

// texts calls f once with each text over the alphabet of up to the given length.
func texts(alphabet string, length int, f func(string)) {
	f("")
	if length == 0 {
		return
	}
	for i := range len(alphabet) {
		texts(alphabet, length-1, func(text string) { f(alphabet[i:i+1] + text) })
	}
}

func TestElementReaderLikeModel(t *testing.T) {
	wellFormed := 0
	texts(`",\a`, 9, func(line string) {
		want, ok := elementModel(line)
		if !ok {
			return
		}
		wellFormed++
		slices.Reverse(want)
		if got := readAll(FromForwarded([]string{line})); !slices.Equal(got, want) {
			t.Errorf("elements of %q = %q, want %q", line, got, want)
		}
	})
	if wellFormed < 1000 {
		t.Errorf("only %d well formed lines were tried", wellFormed)
	}
}

// An element that its writer quoted properly is the first one read, whatever
// stands left of its comma.
func TestNothingOnTheLeftChangesAnElement(t *testing.T) {
	var elements []string
	texts(`",\a`, 5, func(text string) {
		if parts, ok := elementModel(text); ok && len(parts) == 1 {
			elements = append(elements, text)
		}
	})
	elements = append(elements, "for=1.2.3.4", ` for="[2001:db8::1]:4711";by="\\\",";proto=https `)
	if len(elements) < 50 {
		t.Errorf("only %d elements are tried", len(elements))
	}

	texts(`",\a`, 6, func(left string) {
		rest := readAll(FromForwarded([]string{left}))
		for _, element := range elements {
			entries := readAll(FromForwarded([]string{left + "," + element}))
			if entries[0] != element {
				t.Fatalf("behind %q, %q is read as %q", left, element, entries[0])
			}
			if !slices.Equal(entries[1:], rest) {
				t.Fatalf("left of %q, %q is read as %q, want %q", element, left, entries[1:], rest)
			}
		}
	})
}

func TestForwardedFor(t *testing.T) {
	for _, test := range []struct {
		why     string
		element string
		node    string
		ok      bool
	}{
		{"the parameter alone", "for=1.2.3.4", "1.2.3.4", true},
		{"first of several", "for=203.0.113.7;proto=https;by=10.0.0.2", "203.0.113.7", true},
		{"last of several", "by=10.0.0.2;proto=https;for=203.0.113.7", "203.0.113.7", true},
		{"names have no case", `FOR="[2001:db8::1]:4711";by=10.0.0.2`, "[2001:db8::1]:4711", true},
		{"names have no case", "fOr=1.2.3.4", "1.2.3.4", true},
		{"the quotes are not the value's", `for="1.2.3.4"`, "1.2.3.4", true},
		{"white space around the element", " \tfor=1.2.3.4\t ", "1.2.3.4", true},
		{"white space around a parameter", "proto=https ;\tfor=1.2.3.4 ; by=x", "1.2.3.4", true},
		{"white space behind quotes", `for="1.2.3.4" ;by=x`, "1.2.3.4", true},
		{"empty parameters, as the grammar allows", ";;for=1.2.3.4; ;by=x;", "1.2.3.4", true},
		{"a semicolon inside quotes separates nothing", `by=";for=6.6.6.6";for=1.2.3.4`, "1.2.3.4", true},
		{"a comma inside quotes", `by=",for=6.6.6.6";for=1.2.3.4`, "1.2.3.4", true},
		{"an escaped quote inside another value", `by="\";for=6.6.6.6";for=1.2.3.4`, "1.2.3.4", true},
		{"an escaped backslash inside another value", `by="\\";for=1.2.3.4`, "1.2.3.4", true},
		{"IPv6 without its quotes, as some proxies write it", "for=[2001:db8::1]:80", "[2001:db8::1]:80", true},
		{"a host with a port and without quotes", "host=example.com:8080;for=1.2.3.4", "1.2.3.4", true},
		{"a node that is no address is still a node", "for=unknown", "unknown", true},
		{"a node that is no address is still a node", "for=_hidden", "_hidden", true},
		{"an empty value is for others to refuse", "for=", "", true},
		{"an empty value is for others to refuse", `for="";by=x`, "", true},
		{"a name that only begins like it", "forward=6.6.6.6;for=1.2.3.4", "1.2.3.4", true},
		{"an equals sign in a value", "by=a=b;for=1.2.3.4", "1.2.3.4", true},

		{"nothing", "", "", false},
		{"white space", " \t", "", false},
		{"semicolons", ";;", "", false},
		{"an address alone", "1.2.3.4", "", false},
		{"none", "by=10.0.0.2;proto=https", "", false},
		{"a name that only begins like it", "forward=6.6.6.6", "", false},
		{"two", "for=1.2.3.4;for=6.6.6.6", "", false},
		{"two that agree are still two", "for=1.2.3.4;for=1.2.3.4", "", false},
		{"two in different case", "for=1.2.3.4;by=x;For=6.6.6.6", "", false},
		{"two, one empty", "for=;for=6.6.6.6", "", false},
		{"a parameter without a value", "for=1.2.3.4;secure", "", false},
		{"a parameter without a value may be meant as the other one", "for;for=1.2.3.4", "", false},
		{"a value without a name", "=x;for=1.2.3.4", "", false},
		{"white space before the equals sign: another parser's parameter", "for =6.6.6.6;for=1.2.3.4", "", false},
		{"white space behind the equals sign", "for= 1.2.3.4", "", false},
		{"white space in a value", "for=1.2.3.4 5", "", false},
		{"two values", "for=1.2.3.4 by=x", "", false},
		{"NUL in a name", "f\x00or=1.2.3.4", "", false},
		{"letters of another script", "ｆor=1.2.3.4", "", false},
		{"other white space is not white space", "\u00a0for=1.2.3.4", "", false},
		{"a quote that opens only", `for="1.2.3.4`, "", false},
		{"a quote that opens only, in another parameter", `for=6.6.6.6;by="`, "", false},
		{"a quote that opens only, before it", `by=";for=6.6.6.6`, "", false},
		{"a quote that closes only", `for=1.2.3.4"`, "", false},
		{"a quote that closes only, in another parameter", `by=x";for=6.6.6.6`, "", false},
		{"a quote in the middle", `for=1.2"3.4`, "", false},
		{"an empty string before the value", `for=""1.2.3.4`, "", false},
		{"text behind the quotes", `for="1.2.3.4"5`, "", false},
		{"two strings", `for="1.2.3.4""6.6.6.6"`, "", false},
		{"text behind the quotes of another parameter", `by="x"y;for=6.6.6.6`, "", false},
		{"a string that ends in an escape", `for=1.2.3.4;by="x\"`, "", false},
		{"a string that ends in an escape and then in nothing", `for=1.2.3.4;by="x\`, "", false},
		{"an escape in the value: an address needs none", `for="1.2.3.\4"`, "", false},
		{"an escaped quote in the value", `for="\"1.2.3.4"`, "", false},
		{"an escape outside of quotes", `by=\x;for=1.2.3.4`, "", false},
		{"single quotes are part of the value", "for='1.2.3.4'", "'1.2.3.4'", true},
		{"two elements are not one", "for=6.6.6.6,for=1.2.3.4", "", false},
		{"two elements are not one", "for=6.6.6.6;by=x, for=1.2.3.4", "", false},
	} {
		if node, ok := ForwardedFor(test.element); node != test.node || ok != test.ok {
			t.Errorf("%s: node of %q = %q, %t, want %q, %t", test.why, test.element, node, ok, test.node, test.ok)
		}
	}
}

// escape writes text as the inside of a quoted string.
var escape = strings.NewReplacer(`\`, `\\`, `"`, `\"`)

func FuzzForwarded(f *testing.F) {
	f.Add("for=6.6.6.6", "10.0.0.2")
	f.Add(`for=6.6.6.6;by="`, `,`)
	f.Add(`for=6.6.6.6;by="\`, `\`)
	f.Add(`for=6.6.6.6;by=", for=6.6.6.6"`, `"`)
	f.Add("a\nb,c\n", `";for=6.6.6.6, for="6.6.6.6`)
	f.Add(`"\\"\",`, "")
	f.Fuzz(func(t *testing.T, left, value string) {
		lines := strings.Split(left, "\n")
		entries := readAll(FromForwarded(lines))
		if got, want := rejoin(entries), strings.ReplaceAll(left, "\n", ","); got != want {
			t.Errorf("elements of %q join to %q", lines, got)
		}
		for _, entry := range entries {
			if node, ok := ForwardedFor(entry); ok {
				// What is accepted reads the same from both ends.
				if parts, ok := elementModel(entry); !ok || len(parts) != 1 {
					t.Errorf("%q is accepted as one element, and is %q", entry, parts)
				}
				if got := readAll(FromForwarded([]string{entry})); len(got) != 1 {
					t.Errorf("%q is accepted as one element, and is read as %q", entry, got)
				}
				if !strings.Contains(entry, node) || strings.ContainsAny(node, `"\`) {
					t.Errorf("node of %q = %q", entry, node)
				}
			}
		}

		// Whatever the text is, what is appended to it comes first and unchanged,
		// also when its other parameters quote what the caller wrote.
		written := escape.Replace(strings.ReplaceAll(value, "\n", ""))
		for _, element := range []string{
			"for=1.2.3.4",
			` for=1.2.3.4;host="` + written + `"`,
			`host="` + written + `";for="1.2.3.4" `,
		} {
			last := len(lines) - 1
			for _, appended := range [][]string{
				append(slices.Clone(lines), element),
				append(slices.Clone(lines[:last]), lines[last]+","+element),
			} {
				got := readAll(FromForwarded(appended))
				if got[0] != element || !slices.Equal(got[1:], entries) {
					t.Errorf("elements of %q = %q, want those of %q behind the appended one", appended, got, lines)
				}
			}
			if node, ok := ForwardedFor(element); node != "1.2.3.4" || !ok {
				t.Errorf("node of %q = %q, %t", element, node, ok)
			}
			if node, ok := ForwardedFor(element + `;for="` + written + `"`); ok {
				t.Errorf("an element with two nodes yields %q", node)
			}
		}
	})
}

// Text like that of real headers, at random: whatever is well formed reads the
// same from both ends.
func TestElementReaderLikeModelAtRandom(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	for range 20_000 {
		var line strings.Builder
		for i := range random.IntN(5) {
			if i > 0 {
				line.WriteString([]string{",", ", "}[random.IntN(2)])
			}
			for j := range random.IntN(3) {
				if j > 0 {
					line.WriteByte(';')
				}
				line.WriteString([]string{"for=", "by=", "host="}[random.IntN(3)])
				value := randomText(random, `",;\= ab`, random.IntN(8))
				line.WriteString(`"` + escape.Replace(value) + `"`)
			}
		}
		want, ok := elementModel(line.String())
		if !ok {
			t.Fatalf("%q is not well formed", line.String())
		}
		slices.Reverse(want)
		if got := readAll(FromForwarded([]string{line.String()})); !slices.Equal(got, want) {
			t.Fatalf("elements of %q = %q, want %q", line.String(), got, want)
		}
	}
}
