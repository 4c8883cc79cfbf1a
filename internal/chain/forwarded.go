package chain

import "strings"

var (
	blankChars   = newCharSet(" \t")
	betweenChars = newCharSet("; \t")                   // around the parameters of an element
	bareChars    = newCharSet(" \t;\",\\").complement() // those of a value that is not quoted
)

// lastUnquotedComma returns the place of the last comma that stands outside of
// quoted strings, or -1.
//
// It starts outside at the right end, where the nearest proxy wrote. In a well
// formed line that finds the same commas as reading from the left: a backslash
// occurs only inside quoted strings, so a quote behind an odd number of them is
// an escaped one, and all others open or close. In any other line, a quote whose
// partner is missing swallows what is left of it, never what is right of it.
func lastUnquotedComma(line string) int {
	quoted := false
	for i := len(line) - 1; i >= 0; i-- {
		switch line[i] {
		case ',':
			if !quoted {
				return i
			}
		case '"':
			if !quoted {
				quoted = true // the closing quote, if the text is well formed
				continue
			}
			run := i
			for run > 0 && line[run-1] == '\\' {
				run--
			}
			if (i-run)%2 == 0 {
				quoted = false
			}
			i = run // a run is counted for the one quote behind it: the scan stays linear
		}
	}
	return -1
}

// ForwardedFor returns the value of the element's parameter "for", without the
// quotes around it. The node in it is for [ParseNode] to judge.
//
// Parameters are separated by semicolons outside of quoted strings; white space
// (SP, HTAB) around them and empty ones between two semicolons are tolerated.
// Values that should have been quoted but are not, as in host=example.com:8080,
// are tolerated too. It is false where more than one reading is possible:
//
//   - no parameter "for", or more than one, in whatever case they are spelled;
//   - a quoted string that does not end, or does not end its parameter;
//   - a quote, backslash, comma or white space in a value that is not quoted;
//   - a parameter that is not a name, "=" and a value;
//   - a backslash in the value of "for": an address never needs an escape.
func ForwardedFor(element string) (node string, ok bool) {
	found := false
	rest := element[betweenChars.span(element):]
	for rest != "" {
		equals := tokenChars.span(rest)
		if equals == 0 || equals == len(rest) || rest[equals] != '=' {
			return "", false
		}
		name := rest[:equals]
		value, after, ok := cutValue(rest[equals+1:])
		if !ok {
			return "", false
		}
		if strings.EqualFold(name, "for") {
			if found || strings.IndexByte(value, '\\') >= 0 {
				return "", false
			}
			node, found = value, true
		}
		after = after[blankChars.span(after):]
		if after != "" && after[0] != ';' {
			return "", false
		}
		rest = after[betweenChars.span(after):]
	}
	return node, found
}

// cutValue splits text behind the parameter value with which it begins. Quotes
// around the value are taken off, escapes inside them are left in.
func cutValue(text string) (value, rest string, ok bool) {
	if !strings.HasPrefix(text, `"`) {
		end := bareChars.span(text)
		return text[:end], text[end:], true
	}
	for i := 1; i < len(text); i++ {
		switch text[i] {
		case '\\':
			i++ // whatever follows is escaped
		case '"':
			return text[1:i], text[i+1:], true
		}
	}
	return "", "", false
}
