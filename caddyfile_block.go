package edgelimit

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// block reads the lines of a Caddyfile block. It refuses a word that comes twice
// where the second would silently replace the first, and every error it returns
// names a file and a line.
type block struct {
	*caddyfile.Dispenser
	nesting int
	entered bool
	line    string // the word that begins the line
	seen    map[string]bool
}

// next goes to the next line of the block, if there is a block at all.
func (b *block) next() bool {
	if !b.entered {
		b.nesting, b.entered = b.Nesting(), true
	}
	if !b.NextBlock(b.nesting) {
		return false
	}
	if b.Val() != "{" {
		b.line = b.Val()
	}
	return true
}

// placedError names a file and a line already.
type placedError struct{ error }

func (e placedError) Unwrap() error { return e.error }

// place adds the file and the line of the current token, unless err names one.
func place(d *caddyfile.Dispenser, err error) error {
	if err == nil || errors.As(err, new(placedError)) {
		return err
	}
	return placedError{d.WrapErr(err)}
}

func placef(d *caddyfile.Dispenser, format string, args ...any) error {
	return place(d, fmt.Errorf(format, args...))
}

// placeOf is the file and line of the current token, and where a snippet was
// imported from.
func placeOf(d *caddyfile.Dispenser) string {
	return strings.TrimPrefix(d.Err("").Error(), ", at ")
}

// once parses a line whose word may stand once in the block.
func (b *block) once(parse func() error) error {
	word := b.Val()
	if b.seen[word] {
		return placef(b.Dispenser, "%s is set twice: the second would replace the first", word)
	}
	if b.seen == nil {
		b.seen = make(map[string]bool)
	}
	b.seen[word] = true
	return place(b.Dispenser, parse())
}

// unrecognized refuses a line of the block, and says what could stand there.
func (b *block) unrecognized(possible string) error {
	if b.Val() == "{" {
		return placef(b.Dispenser, "%s takes no block", b.line)
	}
	return placef(b.Dispenser, "unrecognized subdirective %q; possible here: %s", b.Val(), possible)
}

// end refuses further arguments on the line.
func (b *block) end() error {
	if b.NextArg() {
		return placef(b.Dispenser, "unexpected argument %q", b.Val())
	}
	return nil
}

// argument reads the one argument of the line. what says what it is.
func (b *block) argument(what string, read func(text string) error) error {
	word := b.Val()
	if !b.NextArg() {
		return placef(b.Dispenser, "%s: an argument is missing: write %s", word, what)
	}
	if err := read(b.Val()); err != nil {
		return place(b.Dispenser, fmt.Errorf("%s %w", word, err))
	}
	return b.end()
}

func (b *block) word(target *string, what string) error {
	return b.argument(what, func(text string) error { *target = text; return nil })
}

func (b *block) words(target *[]string, what string) error {
	word := b.Val()
	if *target = b.RemainingArgs(); len(*target) == 0 {
		return placef(b.Dispenser, "%s: an argument is missing: write %s", word, what)
	}
	return nil
}

func (b *block) flag(target *bool) error {
	*target = true
	return b.end()
}

func (b *block) number(target *int, from, to int) error {
	what := fmt.Sprintf("a whole number from %d to %d", from, to)
	return b.argument(what, func(text string) error {
		n, err := strconv.Atoi(text)
		if err != nil || n < from || n > to {
			return fmt.Errorf("%q: must be %s", text, what)
		}
		*target = n
		return nil
	})
}

// count reads a whole number of at least 1.
func (b *block) count(target *int64) error {
	return b.argument("a whole number of at least 1", func(text string) error {
		n, err := strconv.ParseInt(text, 10, 64)
		if errors.Is(err, strconv.ErrRange) && n > 0 {
			return fmt.Errorf("%q is too large", text)
		}
		if err != nil || n < 1 {
			return fmt.Errorf("%q: must be a whole number of at least 1", text)
		}
		*target = n
		return nil
	})
}

// nameAndRate reads the two arguments that open a limit or a ceiling.
func (b *block) nameAndRate(name, rate *string) error {
	word := b.Val()
	if !b.Args(name, rate) {
		return placef(b.Dispenser, "%s needs a name and a rate: write for example %s login 10/m", word, word)
	}
	if b.NextArg() {
		return placef(b.Dispenser, "unexpected argument %q: %s needs a name and a rate: write for example %s login 10/m", b.Val(), word, word)
	}
	return nil
}

// matcher reads a matcher by name, by path, or as a block. h is nil in the global
// options, which know no names.
func (b *block) matcher(h *httpcaddyfile.Helper, target *caddyhttp.RawMatcherSets) error {
	const forms = "write @name, a path that begins with /, or a block of matchers"
	opening := *b.Dispenser
	if b.CountRemainingArgs() > 0 {
		if h == nil {
			b.NextArg()
			return placef(b.Dispenser, "match %s: in the global options only a block is possible: write match { ... }", b.Val())
		}
		set, ok, err := h.MatcherToken()
		if err != nil {
			return err
		}
		if !ok {
			return placef(b.Dispenser, "match %s: %s", b.Val(), forms)
		}
		if next := *b.Dispenser; next.NextBlock(next.Nesting()) {
			return placef(b.Dispenser, "match %s and a block: %s", b.Val(), forms)
		}
		if set != nil {
			*target = caddyhttp.RawMatcherSets{set}
		}
		return b.end()
	}
	set, err := caddyhttp.ParseCaddyfileNestedMatcherSet(b.Dispenser)
	if err != nil {
		return placedByCaddy(&opening, err)
	}
	if len(set) == 0 {
		if h == nil {
			return placef(&opening, "match: a matcher is missing: write match { ... }")
		}
		return placef(&opening, "match: a matcher is missing: %s", forms)
	}
	*target = caddyhttp.RawMatcherSets{set}
	return nil
}

// placedByCaddy keeps the line that Caddy's own parsers name, as far as they do.
func placedByCaddy(d *caddyfile.Dispenser, err error) error {
	if strings.Contains(err.Error(), ", at "+d.File()+":") {
		return placedError{err}
	}
	return place(d, err)
}

// expandShorthands replaces {host} and the like by their full names, which Caddy
// does in sites but not in global options. It returns a dispenser that stands
// where d stood: on the option's name.
func expandShorthands(d *caddyfile.Dispenser) *caddyfile.Dispenser {
	segment := d.NextSegment()
	httpcaddyfile.NewShorthandReplacer().ApplyToSegment(&segment)
	expanded := caddyfile.NewDispenser(segment)
	expanded.Next()
	return expanded
}
